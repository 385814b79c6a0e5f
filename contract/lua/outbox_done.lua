-- outbox_done: reports the outcome of a delivery attempt.
-- KEYS  1 tag
-- ARGV  1 job id  2 attempt  3 'delivered' | 'retry' | 'dead'  4 ms to the next attempt
--       5 note on the outcome
-- reply {'OK'}          recorded, now or before
--       {'SUPERSEDED'}  a newer message of the job is due now
--       {'FENCED'}      a later attempt has begun
--       {'GONE'}        no such record
local function add_dead_letter(tag, id, tenant, now)
  for _, dead in ipairs({outbox.dead(tag, tenant), outbox.dead(tag, '')}) do
    redis.call('ZADD', dead, now, id)
    redis.call('ZREMRANGEBYSCORE', dead, '-inf', now - OUTBOX_KEEP_MS)
    redis.call('PEXPIRE', dead, OUTBOX_KEEP_MS)
  end
  redis.call('PEXPIRE', tag .. ':out:' .. id, OUTBOX_KEEP_MS)
end

-- Applies the outcome; returns the record's new state. Only final messages become delivered or dead; a
-- start or progress message is dropped.
local function outcome_of(tag, key, id, record, outcome, delay_ms, now)
  if outcome == 'retry' then
    redis.call('HINCRBY', key, 'failures', 1)
    redis.call('ZADD', tag .. ':due:' .. record.to, now + delay_ms, id)
    return 'due'
  end
  if not TERMINAL[record.kind] then return 'idle' end
  if outcome == 'dead' then
    add_dead_letter(tag, id, record.tenant, now)
  else
    redis.call('HDEL', key, 'callback')  -- it may hold a secret
    redis.call('PEXPIRE', key, DELIVERED_KEEP_MS)
  end
  return outcome
end

local function outbox_done(keys, argv)
  local tag, id, now = keys[1], argv[1], now_ms()
  local key = tag .. ':out:' .. id
  local record = {}
  local names = {'state', 'attempt', 'number', 'taken', 'kind', 'to', 'tenant'}
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do record[names[i]] = value end
  if not record.state or not record.tenant then return {'GONE'} end
  if record.attempt ~= argv[2] then return {'FENCED'} end
  if record.taken == '' then return {'OK'} end
  redis.call('HINCRBY', tag .. ':deliveries', argv[3], 1)
  redis.call('ZREM', tag .. ':flying:' .. record.to, id)
  redis.call('ZREM', outbox.flying_of(tag, record.tenant), id)
  redis.call('ZREM', tag .. ':due:' .. record.to, id)  -- a lapsed lease has added it again
  local state
  if record.taken == record.number then
    state = outcome_of(tag, key, id, record, argv[3], tonumber(argv[4]), now)
  else
    redis.call('ZADD', tag .. ':due:' .. record.to, now, id)
    state = 'due'
  end
  redis.call('HSET', key, 'state', state, 'taken', '', 'note', argv[5])
  outbox.reschedule(tag, record.tenant, record.to, now, math.huge)
  return {record.taken == record.number and 'OK' or 'SUPERSEDED'}
end

register('outbox_done', outbox_done, 'allow-oom')
