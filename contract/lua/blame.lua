-- blame: the engine process died while it computed these jobs. They go back to the front of their
-- lanes; a job whose next crash would be its last runs alone; after argument 2 crashes it fails as
-- poison and enters the quarantine.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 crashes until a job is poison  then 3 for each job:
--       id, epoch, description for the quarantine (JSON: sizes and hashes, never text)
-- reply one verdict for each job, in order:
--       {'OK'} queued again   {'failed'} poison   {'FENCED'}, {'GONE'}, {status}
local QUARANTINE_MAX = 1000

local function blame_one(tag, now, incarnation, max_crashes, id, epoch, about)
  local job = load_job(tag, id)
  local refusal = fence(job, incarnation, epoch)
  if refusal then return {refusal} end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return {'expired'}
  end
  job.crashes = job.crashes + 1
  redis.call('HSET', job.key, 'crashes', job.crashes)
  if job.crashes < max_crashes then
    requeue(tag, job, job.crashes == max_crashes - 1)
    return {'OK'}
  end
  terminal(tag, job, 'failed', 'poison', 'the engine died on this job ' .. job.crashes .. ' times',
    now)
  redis.call('ZADD', tag .. ':quarantine', now, id)
  redis.call('HSET', tag .. ':poison', id, about)
  for _, old in ipairs(redis.call('ZRANGE', tag .. ':quarantine', 0, -QUARANTINE_MAX - 1)) do
    redis.call('ZREM', tag .. ':quarantine', old)
    redis.call('HDEL', tag .. ':poison', old)
  end
  return {'failed'}
end

local function blame(keys, argv)
  local tag, now = keys[1], now_ms()
  local verdicts = {}
  for i = 3, #argv, 3 do
    table.insert(verdicts, blame_one(tag, now, argv[1], tonumber(argv[2]), argv[i], argv[i + 1],
      argv[i + 2]))
  end
  return verdicts
end

register('blame', blame, 'allow-oom')
