-- depart: ends a tenant's residence in this partition, which from then on refuses its jobs, and returns
-- what its new home must know. May be repeated until that has it.
-- KEYS  1 tag
-- ARGV  1 tenant  2 version of the move
-- reply {requests, ms since they were counted, tokens, ms since they were counted (levels of its meters),
--        {{partition, version, reserved tokens, stored bytes, late}, …}}   what it has here ('') and
--                                                                      elsewhere
--       {'STALE'}   a later move has taken place
local function meter(record, what, now)
  local level, at = tonumber(record[what] or 0) or 0, tonumber(record[what .. '_ms'] or 0) or 0
  return string.format('%.17g', level), math.max(0, now - at)
end

local function depart(keys, argv)
  local tag, tenant, version, now = keys[1], argv[1], tonumber(argv[2]), now_ms()
  local before, is_in = homes.resident(tag, tenant)
  if before > version or before == version and is_in then return {'STALE'} end
  local key = tag .. ':tenant:' .. tenant
  if before < version then
    redis.call('HSET', tag .. ':residents', '', '1', tenant, string.format('%d out', version))
    redis.call('HDEL', key, 'late')
  end
  local record, names = {}, {'requests', 'requests_ms', 'tokens', 'tokens_ms'}
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do record[names[i]] = value end
  local parts = {{'', unpack(homes.left(tag, tenant))}}
  for _, other in ipairs(homes.others(tag, tenant)) do
    local left = homes.away(tag, tenant, other)
    if left then table.insert(parts, {other, unpack(left)}) end
  end
  local requests, requests_age = meter(record, 'requests', now)
  local tokens, tokens_age = meter(record, 'tokens', now)
  return {requests, requests_age, tokens, tokens_age, parts}
end

register('depart', depart, 'allow-oom')
