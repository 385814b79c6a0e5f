-- release: returns a worker's running jobs to the front of their lanes, or offers them: `offers:<model>:<lane>`
-- has `<id> <epoch> <next event>`, and until when (ms) the claim of another worker may take the job.
-- KEYS  1 tag
-- ARGV  1 incarnation  then 5 for each job:
--       id, epoch, 'drain' (the attempt does not count) | 'error' (it does) | 'offer' (it waits in the engine,
--       and the worker keeps it until it is taken), error code, message
-- reply one verdict for each job, in order:
--       {'OK'} queued again   {'failed'} no attempt is left, or it was released too often
--       {'FENCED'}, {'GONE'}, {status} as for append
local MAX_RELEASES, OFFER_MS = 32, 2500

local function release_one(tag, now, incarnation, id, epoch, kind, code, message)
  local job = load_job(tag, id)
  local refusal = fence(job, incarnation, epoch)
  if refusal then return {refusal} end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return {'expired'}
  end
  if kind == 'offer' then
    local offers = lane_key(tag, 'offers', job.model, job.lane)
    redis.call('ZREMRANGEBYSCORE', offers, '-inf', now)
    redis.call('ZADD', offers, now + OFFER_MS, string.format('%s %d %d', id, job.epoch, job.next))
    redis.call('PEXPIRE', offers, 3600 * 1000)
    return {'OK'}
  elseif kind == 'drain' then
    if job.releases >= MAX_RELEASES then
      terminal(tag, job, 'failed', 'retries', 'released by workers too often', now)
      return {'failed'}
    end
    redis.call('HSET', job.key, 'releases', job.releases + 1, 'attempt', job.attempt - 1)
  elseif job.attempt >= job.max_attempts then
    terminal(tag, job, 'failed', code, message, now)
    return {'failed'}
  end
  requeue(tag, job)
  return {'OK'}
end

local function release(keys, argv)
  local tag, now = keys[1], now_ms()
  local verdicts = {}
  for i = 2, #argv, 5 do
    table.insert(verdicts, release_one(tag, now, argv[1], argv[i], argv[i + 1], argv[i + 2],
      argv[i + 3], argv[i + 4]))
  end
  return verdicts
end

register('release', release, 'allow-oom')
