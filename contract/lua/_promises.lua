-- Spreads the retries of refused jobs: callers return one after another as room becomes free, and the
-- lines (a tenant in a lane) take turns. The sorted set `promised:<model>` holds each line's next retry
-- time (ms); past times do not count.
-- requires shared

local UNPROMISED_RATIO = 2  -- half of the drain rate is promised, the other half is for new jobs
local MAX_PROMISE_MS = 3600 * 1000

local function promise_key(tag, job)
  return tag .. ':promised:' .. job.model, job.lane .. ' ' .. job.tenant
end

-- When this tenant may retry in this lane, at least retry_ms from now, and the time to give to its next
-- refusal. `gap_ms`: time to drain a job of this cost at the promised rate.
function promises.next(tag, job, gap_ms, retry_ms, now)
  local key, line = promise_key(tag, job)
  local lines = redis.call('ZCOUNT', key, '(' .. now, '+inf')
  local own = tonumber(redis.call('ZSCORE', key, line) or 0)
  local at = now + retry_ms
  if own > now then at = math.max(at, own) else at, lines = at + lines * gap_ms, lines + 1 end
  local latest = math.max(now + retry_ms, now + MAX_PROMISE_MS)
  return math.min(at, latest), math.min(at + lines * gap_ms, latest)
end

-- Stores the time to give to the line's next refusal.
function promises.book(tag, job, after, now)
  local key, line = promise_key(tag, job)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  redis.call('ZADD', key, after, line)
  redis.call('PEXPIRE', key, 2 * MAX_PROMISE_MS)
end

-- Forgets the line's promise, because one of its jobs found room.
function promises.forget(tag, job)
  local key, line = promise_key(tag, job)
  redis.call('ZREM', key, line)
end
