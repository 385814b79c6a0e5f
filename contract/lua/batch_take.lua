-- batch_take: leases unfinished batches that no feeder holds, the oldest first. `batches_fed` tells
-- for an hour that there is a feeder.
-- KEYS  1 tag
-- ARGV  1 token of the lease  2 lease (ms)  3 batches at most
-- reply list of batch ids; a repeated call has those of the call before
local FED_MS = 3600000

local function batch_take(keys, argv)
  local tag, most, taken = keys[1], tonumber(argv[3]), {}
  local now, told = now_ms(), tonumber(redis.call('GET', tag .. ':batches_fed') or 0) or 0
  if now - told > FED_MS / 2 then  -- not with each poll
    redis.call('SET', tag .. ':batches_fed', now, 'PX', FED_MS)
  end
  for _, id in ipairs(redis.call('ZRANGE', tag .. ':batches_open', 0, -1)) do
    if #taken >= most then break end
    local key = tag .. ':batch:' .. id
    local status, token, lease = unpack(redis.call('HMGET', key, 'status', 'token', 'lease'))
    if not status then
      redis.call('ZREM', tag .. ':batches_open', id)
    elseif token == argv[1] or (whole_number(lease) or 0) <= now then
      redis.call('HSET', key, 'token', argv[1], 'lease', now + tonumber(argv[2]))
      table.insert(taken, id)
    end
  end
  return taken
end

register('batch_take', batch_take, 'allow-oom')
