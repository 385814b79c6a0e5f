-- batch_save: renews a feeder's lease and records its progress, fenced by the lease's token.
-- KEYS  1 tag
-- ARGV  1 batch id  2 token  3 lease (ms; 0: gives it back)
--       4 expected status ('': any)  5 new status ('': unchanged)
--       6 number of a part ('': none)  7 the part ('': forgets it)  8 … fields and values of the record
-- reply {'OK', status, now (ms)}    recorded, now or before
--       {'CHANGED', status, now}  it has another status than expected, or has ended with another than
--                                 the new one; nothing was recorded
--       {'FENCED'}                another feeder's, or no such batch
local PART_DELAY_MS = 60000  -- parts outlive the batch's end, in case Redis loses its last second
local DEFAULT_KEEP_MS = 30 * 86400 * 1000  -- of a record without a number
-- The final statuses, as messages of the outbox name them.
local DONE = {completed = 'succeeded', failed = 'failed', expired = 'expired', cancelled = 'cancelled'}

local function tell(tag, id, key, kind, now)
  local names = {'callback_to', 'tenant', 'created'}
  local record = redis.call('HMGET', key, unpack(names))
  if not record[1] then return end
  outbox.post(tag, {id = id, key = key, callback_to = record[1], tenant = record[2],
    created = record[3], model = redis.call('HGET', key, 'model') or '', lane = 'batch',
    prompt_tokens = 0, tokens = 0, cached = 0}, kind, now, '', '')
end

local function batch_save(keys, argv)
  local tag, id, now = keys[1], argv[1], now_ms()
  local key = tag .. ':batch:' .. id
  local status, token, lease, keep = unpack(redis.call('HMGET', key, 'status', 'token', 'lease', 'keep_ms'))
  if not status or token ~= argv[2] or (whole_number(lease) or 0) <= now then return {'FENCED'} end
  redis.call('HSET', key, 'lease', now + tonumber(argv[3]))
  local is_repeat = status == argv[5]
  if argv[4] ~= '' and status ~= argv[4] and not is_repeat then return {'CHANGED', status, now} end
  if DONE[status] then
    return {(argv[5] == '' or is_repeat) and 'OK' or 'CHANGED', status, now}
  end
  if argv[7] ~= '' then
    redis.call('HSET', tag .. ':batch_parts:' .. id, argv[6], argv[7])
  elseif argv[6] ~= '' then
    redis.call('HDEL', tag .. ':batch_parts:' .. id, argv[6])
  end
  if #argv > 7 then redis.call('HSET', key, unpack(argv, 8)) end
  if argv[5] ~= '' and not is_repeat then
    status = argv[5]
    redis.call('HSET', key, 'status', status, status .. '_at', now)
  end
  if DONE[status] then
    keep = whole_number(keep) or DEFAULT_KEEP_MS
    tell(tag, id, key, DONE[status], now)
    redis.call('ZREM', tag .. ':batches_open', id)
    redis.call('ZADD', tag .. ':objects_due', now + PART_DELAY_MS, id)
    redis.call('PEXPIRE', key, keep)
    redis.call('PEXPIRE', tag .. ':batch_parts:' .. id, keep)
  end
  return {'OK', status, now}
end

register('batch_save', batch_save, 'allow-oom')
