-- The outbox of callback messages, as far as several functions use it. Messages wait in three levels,
-- each a sorted set by the time of the next visit: tenants in `outbox`, a tenant's destinations in
-- `due:of:<tenant>`, a destination's messages in `due:<destination>`.
-- requires shared

-- A record is kept for a week, once delivered for a day.
local OUTBOX_KEEP_MS, DELIVERED_KEEP_MS = 7 * 86400 * 1000, 86400 * 1000

-- Schedules a destination and its tenant for `at`, unless they are scheduled earlier.
function outbox.wake(tag, tenant, to, at)
  redis.call('ZADD', tag .. ':due:of:' .. tenant, 'LT', at, to)
  redis.call('ZADD', tag .. ':outbox', 'LT', at, tenant)
end

-- The leases of a tenant's messages in flight.
function outbox.flying_of(tag, tenant)
  return tag .. ':flying:of:' .. tenant
end

-- Leases a message that is in flight.
function outbox.lease(tag, tenant, to, id, lease_ms, now)
  redis.call('ZADD', tag .. ':flying:' .. to, now + lease_ms, id)
  redis.call('ZADD', outbox.flying_of(tag, tenant), now + lease_ms, id)
  redis.call('PEXPIRE', outbox.flying_of(tag, tenant), lease_ms)
end

-- Sets the time of a sorted set's member; math.huge removes it.
local function set_turn(key, at, member)
  if at == math.huge then redis.call('ZREM', key, member) else redis.call('ZADD', key, at, member) end
end

-- Reschedules a destination for its next due message or lapsing lease. With `cap` messages in flight,
-- due messages wait until one of them is done.
function outbox.reschedule(tag, tenant, to, now, cap)
  local due = redis.call('ZRANGE', tag .. ':due:' .. to, 0, 0, 'WITHSCORES')[2]
  local in_flight = tag .. ':flying:' .. to
  local lapse = redis.call('ZRANGE', in_flight, 0, 0, 'WITHSCORES')[2]
  if redis.call('ZCARD', in_flight) >= cap then due = nil end
  -- Overdue messages count as due now, so that tenants and their destinations take turns.
  set_turn(tag .. ':due:of:' .. tenant,
    math.min(due and math.max(due, now) or math.huge, lapse or math.huge), to)
  local first = redis.call('ZRANGE', tag .. ':due:of:' .. tenant, 0, 0, 'WITHSCORES')[2]
  set_turn(tag .. ':outbox', first and math.max(first, now) or math.huge, tenant)
end

-- The dead letters of a tenant; '': those of all, which are counted.
function outbox.dead(tag, tenant)
  return tag .. ':dead:' .. tenant
end

-- Schedules a dead letter again, with a new series of attempts; the reply of outbox_replay.
function outbox.replay(tag, id, tenant, now)
  local key = tag .. ':out:' .. id
  local record = redis.call('HMGET', key, 'state', 'tenant', 'to')
  if record[2] ~= tenant then return 'NOT_FOUND' end
  if record[1] ~= 'dead' then return record[1] end
  redis.call('HSET', key, 'state', 'due', 'failures', 0)
  redis.call('PEXPIRE', key, OUTBOX_KEEP_MS)
  redis.call('ZREM', outbox.dead(tag, tenant), id)
  redis.call('ZREM', outbox.dead(tag, ''), id)
  redis.call('ZADD', tag .. ':due:' .. record[3], now, id)
  outbox.wake(tag, tenant, record[3], now)
  return 'OK'
end

-- Posts a message of a job with a callback: 'started', 'progress' or its final status. A job has one
-- record, so its messages are sent one at a time: a new message replaces one that waits, and waits
-- for one in flight. Therefore no message arrives after the final one.
function outbox.post(tag, job, kind, now, code, message)
  if not job.callback_to then return end
  local key = tag .. ':out:' .. job.id
  local is_taken = redis.call('HGET', key, 'state') == 'taken'
  redis.call('HINCRBY', key, 'number', 1)
  redis.call('HSET', key, 'kind', kind, 'at', now, 'failures', 0, 'note', '', 'to', job.callback_to,
    'tenant', job.tenant, 'model', job.model, 'lane', job.lane, 'prompt_tokens', job.prompt_tokens,
    'tokens', job.tokens, 'cached', job.cached, 'code', code, 'message', message,
    'created', job.created,
    'callback', redis.call('HGET', job.key, 'callback') or '')
  if TERMINAL[kind] then redis.call('PEXPIRE', key, OUTBOX_KEEP_MS) end
  if is_taken then return end
  redis.call('HSET', key, 'state', 'due')
  redis.call('ZADD', tag .. ':due:' .. job.callback_to, now, job.id)
  outbox.wake(tag, job.tenant, job.callback_to, now)
end
