-- operation_take: leases the open operation that no gateway holds and that was worked on longest ago.
-- KEYS  1 tag
-- ARGV  1 token of the lease  2 lease (ms)  3 only this operation ('': any)
-- reply {operation id} or {}
local MAX_LOOKS = 128

local function operation_take(keys, argv)
  local tag, now = keys[1], now_ms()
  local open = tag .. ':operations_open'
  local ids = argv[3] ~= '' and {argv[3]} or redis.call('ZRANGE', open, 0, MAX_LOOKS - 1)
  local last = redis.call('ZRANGE', open, -1, -1, 'WITHSCORES')[2] or 0
  for _, id in ipairs(ids) do
    local key = tag .. ':operation:' .. id
    local state, lease = unpack(redis.call('HMGET', key, 'state', 'lease'))
    if not state then
      redis.call('ZREM', open, id)
    elseif state == 'running' and (whole_number(lease or 0) or 0) <= now then
      redis.call('HSET', key, 'token', argv[1], 'lease', now + tonumber(argv[2]))
      redis.call('ZADD', open, math.max(now, last + 1), id)  -- also within a millisecond behind all
      return {id}
    end
  end
  return {}
end

register('operation_take', operation_take, 'allow-oom')
