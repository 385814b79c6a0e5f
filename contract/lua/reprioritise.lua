-- reprioritise: gives a queued or running job another lane or deadline, for its caller.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant  3 lane ('': as it is)  4 deadline (ms from now, '': as it is)
-- reply {'OK'}   {status} it has ended   {'NOT_FOUND'} no such job of the tenant
local function reprioritise(keys, argv)
  local tag, now = keys[1], now_ms()
  local job = load_job(tag, argv[1])
  if not job or job.tenant ~= argv[2] then return {'NOT_FOUND'} end
  if TERMINAL[job.state] then return {job.state} end
  running.write_back(tag, job)
  if argv[4] ~= '' then
    job.deadline = now + tonumber(argv[4])
    redis.call('HSET', job.key, 'deadline', job.deadline)
    redis.call('ZADD', tag .. ':deadlines', job.deadline, job.id)
  end
  if job.owner ~= '' then
    local lane = argv[3] ~= '' and argv[3] or job.lane
    redis.call('PUBLISH', tag .. ':ctl:' .. job.owner,
      'moved ' .. job.id .. ' ' .. lane .. ' ' .. job.deadline - now)
  end
  if argv[3] == '' or argv[3] == job.lane then return {'OK'} end
  admission.reprice(tag, job, argv[3], now)
  if job.state == 'queued' then
    local suspect = string.find(job.stream, ':suspect$')
    dequeue(tag, job)
    fairness.move(tag, job, argv[3], suspect)
    job.lane = argv[3]
    redis.call('HSET', job.key, 'lane', job.lane, 'predicted', -1)
    enqueue(tag, job, suspect and job.stream or tenant_stream(job))
  else
    ledger.count_running(tag, job, -1)
    fairness.move(tag, job, argv[3], true)
    job.lane = argv[3]
    ledger.count_running(tag, job, 1)
    redis.call('HSET', job.key, 'lane', job.lane, 'predicted', -1)
  end
  ledger.hold(tag, job)
  return {'OK'}
end

register('reprioritise', reprioritise, 'allow-oom')
