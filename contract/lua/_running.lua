-- Jobs that run and have output: what an append must know of one, packed, by id in one hash of its
-- worker's, `run:<incarnation>`. So a step reads and writes those of all its jobs in two commands.
-- As long as a job is there, `next`, `tokens` and `hash` of its record may be old. It comes there
-- with output, and goes when it leaves its worker, or when what else is packed changes; the next
-- append of it brings it back.
local PACKED = '<xdddc8ddds'  -- begins and ends with a zero byte; numbers as doubles, the hash
local PROGRESS = '<xdddc8'  -- the beginning of it: epoch, next, tokens, hash

function running.key(tag, owner)
  return tag .. ':run:' .. owner
end

-- Where it runs: its lane and its model. The blanks make what is packed longer than 64 bytes: a hash
-- of shorter values is one list to Redis, and each is sought from its beginning.
function running.model_lane(job)
  return string.format('%-8s %s', job.lane, job.model)
end

-- `to_do`: tokens of its cost that are not computed yet.
function running.pack(epoch, next_number, tokens, hash, deadline, max_tokens, remaining, model_lane)
  return struct.pack(PACKED, epoch, next_number, tokens, hash, deadline, max_tokens, remaining, model_lane)
end

-- What was packed, in that order. Nothing where no function packed it.
function running.unpack(packed)
  if string.byte(packed) ~= 0 then return end
  local is_readable, epoch, next_number, tokens, hash, deadline, max_tokens, remaining, model_lane =
    pcall(struct.unpack, PACKED, packed)
  if not is_readable then return end
  local sum = tokens + deadline + max_tokens + remaining  -- none is NaN, none infinite
  if sum >= -2 ^ 53 and sum <= 2 ^ 53 and string.find(model_lane, '^%S+ ') then
    return epoch, next_number, tokens, hash, deadline, max_tokens, remaining, model_lane
  end
end

-- The job goes on from here. One that tells of its progress has more to do at each event than this.
function running.store(tag, job)
  if job.tokens == 0 or job.callback_every > 0 then return end
  redis.call('HSET', running.key(tag, job.owner), job.id, running.pack(job.epoch, job.next,
    job.tokens, job.hash, job.deadline, job.max_tokens, job.cost - ledger.done(job),
    running.model_lane(job)))
end

-- How far the job is: {next, tokens, hash}, nil where its record says it. `packed` as in load_job.
function running.progress(tag, owner, id, packed)
  if not owner or owner == '' then return nil end
  if packed == nil then packed = redis.call('HGET', running.key(tag, owner), id) end
  if not packed then return nil end
  local is_readable, _, next_number, tokens, hash = pcall(struct.unpack, PROGRESS, packed)
  if not is_readable or not whole_number(next_number) or not whole_number(tokens) then return nil end
  return {next = next_number, tokens = tokens, hash = hash}
end

-- From now on its record says all of the job again.
function running.write_back(tag, job)
  if job.owner == '' then return end
  if redis.call('HDEL', running.key(tag, job.owner), job.id) == 1 then
    redis.call('HSET', job.key, 'next', job.next, 'tokens', job.tokens, 'hash', job.hash)
  end
end
