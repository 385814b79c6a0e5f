-- Jobs that wait for the time at which they may start (`start` of their record): in a stream that no
-- worker claims from, and by that time in the sorted set `later`, where one of the same time comes in
-- the order of submission. They are no load of their lane. The hash
-- `later_tokens:<model>:<lane>` has the tokens of each tenant's, field '' of all.
-- requires shared, ledger

function later.stream(job)
  return 'q:' .. job.model .. ':later'
end

local function tokens_key(tag, job)
  return lane_key(tag, 'later_tokens', job.model, job.lane)
end

local function due_entry(job)
  return string.format('%015d %s', job.created, job.id)
end

-- Adds a job to (1) or removes it from (-1) those that wait for their time.
function later.count(tag, job, sign)
  if sign > 0 then
    redis.call('ZADD', tag .. ':later', job.start, due_entry(job))
  else
    redis.call('ZREM', tag .. ':later', due_entry(job))
  end
  for _, name in ipairs({job.tenant, ''}) do
    if redis.call('HINCRBY', tokens_key(tag, job), name, sign * job.cost) <= 0 then
      redis.call('HDEL', tokens_key(tag, job), name)
    end
  end
end

-- The tokens of the tenant's and of all jobs of the lane that wait for their time.
function later.tokens(tag, job)
  local found = redis.call('HMGET', tokens_key(tag, job), job.tenant, '')
  return whole_number(found[1] or 0) or 0, whole_number(found[2] or 0) or 0
end

-- Whether the job waits for its time.
function later.holds(job)
  return job.state == 'queued' and job.stream == later.stream(job)
end
