-- What callers are to be told: the part of the outbox that other functions share.

-- A record of the outbox that ended well is kept for a day, any other for a week.
local OUTBOX_KEEP_MS, DELIVERED_KEEP_MS = 7 * 86400 * 1000, 86400 * 1000

-- Lets a destination be looked at from `at` on, if not before.
function outbox.wake(tag, to, at)
  redis.call('ZADD', tag .. ':outbox', 'LT', at, to)
end

-- Says anew when a destination is to be looked at: when something is due or a lease lapses; where
-- `cap` messages are on their way, not before one of them is done.
function outbox.reschedule(tag, to, now, cap)
  local due = redis.call('ZRANGE', tag .. ':due:' .. to, 0, 0, 'WITHSCORES')[2]
  local in_flight = tag .. ':flying:' .. to
  local lapse = redis.call('ZRANGE', in_flight, 0, 0, 'WITHSCORES')[2]
  if redis.call('ZCARD', in_flight) >= cap then due = nil end
  -- What is due goes to the end of the line, so that destinations take turns.
  local at = math.min(due and math.max(due, now) or math.huge, lapse or math.huge)
  if at == math.huge then
    redis.call('ZREM', tag .. ':outbox', to)
  else
    redis.call('ZADD', tag .. ':outbox', at, to)
  end
end

-- Puts a message into the outbox of a job with a callback: 'started', 'progress', or the status in
-- which it ended. A job has one record there, so that its messages go one by one: a later one
-- takes the place of one that waits, and waits for one that is on its way. Hence nothing
-- overtakes the end.
function outbox.post(tag, job, kind, now, code, message)
  if not job.callback_to then return end
  local key = tag .. ':out:' .. job.id
  local is_taken = redis.call('HGET', key, 'state') == 'taken'
  redis.call('HINCRBY', key, 'number', 1)
  redis.call('HSET', key, 'kind', kind, 'at', now, 'failures', 0, 'note', '', 'to', job.callback_to,
    'tenant', job.tenant, 'model', job.model, 'lane', job.lane, 'prompt_tokens', job.prompt_tokens,
    'tokens', job.tokens, 'code', code, 'message', message,
    'created', job.created,
    'callback', redis.call('HGET', job.key, 'callback') or '')
  if TERMINAL[kind] then redis.call('PEXPIRE', key, OUTBOX_KEEP_MS) end
  if is_taken then return end
  redis.call('HSET', key, 'state', 'due')
  redis.call('ZADD', tag .. ':due:' .. job.callback_to, now, job.id)
  outbox.wake(tag, job.callback_to, now)
end
