-- When those who are refused shall come again: not all at once, but one after another as room for
-- them comes, the lines (a tenant in a lane) in turns. tests/model/reference_promises.py says the same in Python.
-- `promised:<model>` has for each line when the next of it may come (ms); what is past is no more.

local UNPROMISED_RATIO = 2  -- half of the drain rate is theirs; the other half is promised
local MAX_PROMISE_MS = 3600 * 1000

local promises = {}

local function promise_key(tag, job)
  return tag .. ':promised:' .. job.model, job.lane .. ' ' .. job.tenant
end

-- Where another try may do in retry_ms at the earliest: the time of the line's next promise, and
-- of that after it. `gap_ms` is how long a job of this cost takes of the promised rate.
function promises.next(tag, job, gap_ms, retry_ms, now)
  local key, line = promise_key(tag, job)
  local lines = redis.call('ZCOUNT', key, '(' .. now, '+inf')
  local own = tonumber(redis.call('ZSCORE', key, line) or 0)
  local at = now + retry_ms
  if own > now then at = math.max(at, own) else at, lines = at + lines * gap_ms, lines + 1 end
  local latest = math.max(now + retry_ms, now + MAX_PROMISE_MS)
  return math.min(at, latest), math.min(at + lines * gap_ms, latest)
end

-- The line's next one comes at this time, or later.
function promises.book(tag, job, after, now)
  local key, line = promise_key(tag, job)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  redis.call('ZADD', key, after, line)
  redis.call('PEXPIRE', key, 2 * MAX_PROMISE_MS)
end

-- A job of the line has found room at once: what was promised waits for nobody.
function promises.forget(tag, job)
  local key, line = promise_key(tag, job)
  redis.call('ZREM', key, line)
end
