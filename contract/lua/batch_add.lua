-- batch_add: records a new batch, whose file is to be validated.
-- KEYS  1 tag
-- ARGV  1 batch id  2 tenant  3 window (ms)  4 ms that it is kept after its end
--       5 batches of the tenant that may be open (0: no limit)  6 … fields and values of its record
-- reply {'OK'}    recorded, now or before
--       {'FULL'}  as many are open
local function num_open(tag, tenant)
  local number = 0
  for _, id in ipairs(redis.call('ZRANGE', tag .. ':batches_open', 0, -1)) do
    if redis.call('HGET', tag .. ':batch:' .. id, 'tenant') == tenant then number = number + 1 end
  end
  return number
end

local function batch_add(keys, argv)
  local tag, id, tenant, now = keys[1], argv[1], argv[2], now_ms()
  local key = tag .. ':batch:' .. id
  if redis.call('EXISTS', key) == 1 then return {'OK'} end
  local window, keep, most = tonumber(argv[3]), tonumber(argv[4]), tonumber(argv[5])
  if most > 0 and num_open(tag, tenant) >= most then return {'FULL'} end
  redis.call('HSET', key, 'tenant', tenant, 'status', 'validating', 'created', now,
    'expires', now + window, 'keep_ms', keep, unpack(argv, 6))
  local list = tag .. ':batches:' .. tenant
  redis.call('ZREMRANGEBYSCORE', list, '-inf', now - window - 2 * keep)
  redis.call('ZADD', list, now, id)
  redis.call('PEXPIRE', list, window + 2 * keep)
  redis.call('ZADD', tag .. ':batches_open', now, id)
  return {'OK'}
end

redis.register_function('batchway_v1_batch_add', batch_add)
