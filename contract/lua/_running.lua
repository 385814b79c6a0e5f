-- Progress of running jobs: the hash `run:<incarnation>` holds for each of a worker's jobs with output,
-- packed, what an append needs, so that a step reads and writes all its jobs in two commands. While a
-- job is in the hash, `next`, `tokens` and `hash` of its record may be outdated. An append adds a job;
-- leaving the worker or a change of other packed values removes it.
-- requires shared
local PACKED = '<xddddc8dddss'  -- begins with a zero byte; numbers are doubles, the log's hash has 8 bytes
local PROGRESS = '<xddddc8'  -- its beginning, up to the hash

function running.key(tag, owner)
  return tag .. ':run:' .. owner
end

-- The job's lane and model. Padding makes the packed value longer than 64 bytes: Redis searches a hash
-- of shorter values linearly.
function running.model_lane(job)
  return string.format('%-8s %s', job.lane, job.model)
end

-- `remaining`: tokens of the job's cost that are not computed yet.
function running.pack(epoch, next_number, tokens, log_bytes, hash, deadline, max_tokens, remaining,
    model_lane, channel)
  return struct.pack(PACKED, epoch, next_number, tokens, log_bytes, hash, deadline, max_tokens,
    remaining, model_lane, channel)
end

-- The packed values in that order; nothing where the value is malformed.
function running.unpack(packed)
  if string.byte(packed) ~= 0 then return end
  local is_readable, epoch, next_number, tokens, log_bytes, hash, deadline, max_tokens, remaining,
    model_lane, channel = pcall(struct.unpack, PACKED, packed)
  if not is_readable then return end
  local sum = tokens + log_bytes + deadline + max_tokens + remaining  -- NaN and inf fail the bounds
  if sum >= -2 ^ 53 and sum <= 2 ^ 53 and string.find(model_lane, '^%S+ ') then
    return epoch, next_number, tokens, log_bytes, hash, deadline, max_tokens, remaining, model_lane,
      channel
  end
end

-- Adds a job to the hash, unless its progress callbacks need the record at each event.
function running.store(tag, job)
  if job.tokens == 0 or job.callback_every > 0 then return end
  redis.call('HSET', running.key(tag, job.owner), job.id, running.pack(job.epoch, job.next,
    job.tokens, job.log_bytes, job.hash, job.deadline, job.max_tokens, job.cost - ledger.done(job),
    running.model_lane(job), job.channel or ''))
end

-- {next, tokens, log_bytes, hash} of a job; nil where its record is current. `packed` as in load_job.
function running.progress(tag, owner, id, packed)
  if not owner or owner == '' then return nil end
  if packed == nil then packed = redis.call('HGET', running.key(tag, owner), id) end
  if not packed then return nil end
  local is_readable, _, next_number, tokens, log_bytes, hash = pcall(struct.unpack, PROGRESS, packed)
  if not is_readable or not whole_number(next_number + tokens + log_bytes) then return nil end
  return {next = next_number, tokens = tokens, log_bytes = log_bytes, hash = hash}
end

-- Writes a job's progress to its record and removes it from the hash.
function running.write_back(tag, job)
  if job.owner == '' then return end
  if redis.call('HDEL', running.key(tag, job.owner), job.id) == 1 then
    redis.call('HSET', job.key, 'next', job.next, 'tokens', job.tokens, 'log_bytes', job.log_bytes,
      'hash', job.hash)
  end
end
