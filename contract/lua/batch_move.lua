-- batch_move: has a batch start at another time, with a window of the same length.
-- KEYS  1 tag
-- ARGV  1 batch id  2 tenant  3 start (Unix ms; the past: now)
-- reply {'OK'}   {'STARTED'} its lines run, or it has ended   {'NOT_FOUND'} no such batch of the tenant
local function batch_move(keys, argv)
  local key, now = keys[1] .. ':batch:' .. argv[1], now_ms()
  local status, tenant, before, expires = unpack(redis.call('HMGET', key, 'status', 'tenant', 'start', 'expires'))
  if not status or tenant ~= argv[2] then return {'NOT_FOUND'} end
  before = whole_number(before or 0) or 0
  if before <= now or status ~= 'validating' and status ~= 'in_progress' then return {'STARTED'} end
  local start = math.max(now, tonumber(argv[3]))
  redis.call('HSET', key, 'start', start, 'expires', (whole_number(expires) or before) + start - before)
  return {'OK'}
end

register('batch_move', batch_move, 'allow-oom')
