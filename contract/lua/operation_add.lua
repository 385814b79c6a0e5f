-- operation_add: records an operation on many jobs, which gateways work through (operation_step).
-- KEYS  1 tag
-- ARGV  1 operation id  2 tenant that asked  3 tenant of the jobs ('': all)
--       4 kind: cancel, replay, replay_callbacks  5 filters (msgpack, _filters.lua)
--       6 what gateways must know to go on (msgpack)  7 operations of the tenant that may be open
-- reply {'OK'}    recorded, now or before
--       {'FULL'}  as many are open
local function is_full(tag, owner, most)
  local number = 0
  for _, id in ipairs(redis.call('ZRANGE', tag .. ':operations_open', 0, -1)) do
    if redis.call('HGET', tag .. ':operation:' .. id, 'owner') == owner then number = number + 1 end
  end
  return number >= most
end

local function operation_add(keys, argv)
  local tag, id, owner, now = keys[1], argv[1], argv[2], now_ms()
  local key = tag .. ':operation:' .. id
  if redis.call('EXISTS', key) == 1 then return {'OK'} end
  if is_full(tag, owner, tonumber(argv[7])) then return {'FULL'} end
  local before = now + 1  -- what is submitted later is not meant
  if argv[4] ~= 'replay_callbacks' and filters.unpack(argv[5]).before > 0 then
    before = math.min(before, filters.unpack(argv[5]).before)
  end
  redis.call('HSET', key, 'owner', owner, 'tenant', argv[3], 'kind', argv[4], 'wanted', argv[5],
    'terms', argv[6], 'state', 'running', 'matched', 0, 'done', 0, 'failed', 0, 'created', now,
    'cursor', cmsgpack.pack({before, ''}))
  redis.call('ZADD', tag .. ':operations:' .. owner, now, id)
  redis.call('ZREMRANGEBYSCORE', tag .. ':operations:' .. owner, '-inf', now - OPERATION_MS)
  redis.call('PEXPIRE', tag .. ':operations:' .. owner, OPERATION_MS)
  redis.call('ZADD', tag .. ':operations_open', now, id)
  return {'OK'}
end

redis.register_function('batchway_v1_operation_add', operation_add)
