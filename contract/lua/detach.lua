-- detach: the caller of a job stops waiting; the job continues with a new deadline and retention.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant  3 deadline (ms from now)  4 retention (ms); neither shortens the job's
-- reply {'OK'}   {status} it has ended   {'NOT_FOUND'} no such job of the tenant
local function detach(keys, argv)
  local tag, now = keys[1], now_ms()
  local job = load_job(tag, argv[1])
  if not job or job.tenant ~= argv[2] then return {'NOT_FOUND'} end
  if TERMINAL[job.state] then return {job.state} end
  running.write_back(tag, job)
  local deadline = math.max(job.deadline, now + tonumber(argv[3]))
  redis.call('HSET', job.key, 'attendance', 0, 'deadline', deadline,
    'ttl_ms', math.max(job.ttl_ms, tonumber(argv[4])))
  redis.call('HDEL', job.key, 'passing')
  redis.call('ZREM', tag .. ':attended', job.id)
  redis.call('ZADD', tag .. ':deadlines', deadline, job.id)
  if job.owner ~= '' then
    redis.call('PUBLISH', tag .. ':ctl:' .. job.owner,
      'moved ' .. job.id .. ' ' .. job.lane .. ' ' .. deadline - now)
  end
  return {'OK'}
end

register('detach', detach, 'allow-oom')
