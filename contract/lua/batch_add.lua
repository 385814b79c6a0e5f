-- batch_add: records a new batch, whose file is to be validated.
-- KEYS  1 tag
-- ARGV  1 batch id  2 tenant  3 window (ms, from now or from its start)  4 ms that it is kept after its end
--       5 batches of the tenant that may be open (0: no limit)  6 start (Unix ms; 0: now)
--       7 … fields and values of its record
-- reply {'OK'}    recorded, now or before
--       {'FULL'}  as many are open
local MAX_WINDOWS_MS = 60 * 86400 * 1000  -- until a batch's end: the start is at most 30 days ahead

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
  local start = math.max(now, tonumber(argv[6]))
  redis.call('HSET', key, 'tenant', tenant, 'status', 'validating', 'created', now,
    'expires', start + window, 'keep_ms', keep, unpack(argv, 7))
  if start > now then redis.call('HSET', key, 'start', start) end
  local list = tag .. ':batches:' .. tenant
  redis.call('ZREMRANGEBYSCORE', list, '-inf', now - MAX_WINDOWS_MS - 2 * keep)
  redis.call('ZADD', list, now, id)
  redis.call('PEXPIRE', list, MAX_WINDOWS_MS + 2 * keep)
  redis.call('ZADD', tag .. ':batches_open', now, id)
  return {'OK'}
end

redis.register_function('batchway_v1_batch_add', batch_add)
