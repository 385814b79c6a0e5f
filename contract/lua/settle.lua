-- settle: makes this partition the home of a tenant, in a version of its home.
-- KEYS  1 tag
-- ARGV  1 tenant  2 version  3 number of this partition
--       after a move also what `depart` returned: 4 the old home  5 requests  6 ms since they were counted
--       7 tokens  8 ms since they were counted  then 5 for each partition: number, version, reserved
--       tokens, stored bytes, late
-- reply {'OK'}      it lives here, now or before
--       {'STALE'}   a later move has taken place
local function take_over(tag, tenant, number, argv, now)
  local key = tag .. ':tenant:' .. tenant
  redis.call('HSET', key, 'requests', argv[5], 'requests_ms', now - argv[6], 'tokens', argv[7],
    'tokens_ms', now - argv[8])
  redis.call('HSETNX', key, 'reserved', 0)
  for i = 9, #argv, 5 do
    local other, late = argv[i] == '' and argv[4] or argv[i], argv[i + 4]
    if other ~= number then
      local left = {tonumber(argv[i + 1]), tonumber(argv[i + 2]), tonumber(argv[i + 3]), late}
      homes.set_away(tag, tenant, other, left)
    else  -- it was the home before: its meter counts what ended here meanwhile
      local _, own = homes.late(redis.call('HGET', key, 'late'))
      local _, known = homes.late(late)
      homes.add_late(tag, tenant, own - known)
    end
  end
  redis.call('HDEL', key, 'late')
  if (whole_number(redis.call('HGET', key, 'reserved')) or 0) <= 0 then ledger.expire_tenant(key) end
end

local function settle(keys, argv)
  local tag, tenant, version = keys[1], argv[1], tonumber(argv[2])
  local before, is_in = homes.resident(tag, tenant)
  if before > version or before == version and not is_in then return {'STALE'} end
  if before == version then return {'OK'} end
  redis.call('HSET', tag .. ':residents', '', '1', tenant, string.format('%d in', version))
  if argv[4] then
    for _, other in ipairs(homes.others(tag, tenant)) do homes.set_away(tag, tenant, other, nil) end
    take_over(tag, tenant, argv[3], argv, now_ms())
  end
  return {'OK'}
end

register('settle', settle, 'allow-oom')
