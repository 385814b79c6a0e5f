-- file_read: the records of files; writes nothing.
-- KEYS  1 tag
-- ARGV  ids
-- reply list of records {field, value, …}; {} for a file that does not exist or has expired, and for a
--       key of another type
local function record(key, now)
  local expires = whole_number(redis.call('HGET', key, 'expires')) or 0
  return expires > now and redis.call('HGETALL', key) or {}
end

local function file_read(keys, argv)
  local found, now = {}, now_ms()
  for i, id in ipairs(argv) do found[i] = try(record, keys[1] .. ':file:' .. id, now) or {} end
  return found
end

register('file_read', file_read, 'no-writes')
