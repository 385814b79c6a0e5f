-- pause: pauses a lane, a tenant, or a tenant in a lane; see _pauses.lua.
-- KEYS  1 tag
-- ARGV  1 model  2 lane  3 tenant ('*' each: all)  4 by whom: 'operator' or 'tenant'
-- reply {'OK', ms of its beginning, by whom}  paused, now or before
--       {'FULL'}                              tenants have as many pauses as they may
local MAX_PAUSES = 256  -- each call and each claim reads all

local function pause(keys, argv)
  local key, now = keys[1] .. ':paused', now_ms()
  local field = argv[1] .. ' ' .. argv[2] .. ' ' .. argv[3]
  local since, by = string.match(redis.call('HGET', key, field) or '', '^(%d+) (%S+)$')
  if by == argv[4] or by == 'operator' then return {'OK', tonumber(since), by} end
  if argv[4] ~= 'operator' and redis.call('HLEN', key) >= MAX_PAUSES then return {'FULL'} end
  since = tonumber(since) or now
  redis.call('HSET', key, field, string.format('%d %s', since, argv[4]))
  return {'OK', since, argv[4]}
end

register('pause', pause, 'allow-oom')
