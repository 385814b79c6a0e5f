-- file_drop: forgets a file. Its content is due for deletion from then on.
-- KEYS  1 tag
-- ARGV  1 file id  2 tenant ('': of any tenant)
-- reply {'DROPPED'}   {'NOT_FOUND'} no such file of the tenant
local function file_drop(keys, argv)
  local tag, id = keys[1], argv[1]
  local key = tag .. ':file:' .. id
  local record = redis.call('HMGET', key, 'tenant', 'bytes')
  local tenant = record[1]
  if not tenant or (argv[2] ~= '' and tenant ~= argv[2]) then return {'NOT_FOUND'} end
  redis.call('DEL', key)
  redis.call('ZREM', tag .. ':files:' .. tenant, id)
  redis.call('ZADD', tag .. ':objects_due', now_ms(), id)
  if redis.call('HINCRBY', tag .. ':file_bytes', tenant, 0 - (whole_number(record[2]) or 0)) <= 0 then
    redis.call('HDEL', tag .. ':file_bytes', tenant)
  end
  return {'DROPPED'}
end

register('file_drop', file_drop, 'allow-oom')
