-- reprioritise: gives a queued or running job another lane or deadline, or one that no worker has claimed
-- another start, for its caller.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant  3 lane ('': as it is)  4 deadline (ms from now, or from
--       its start if that is to come, '': as it is)  5 start (Unix ms, '': as it is); it takes the deadline along
-- reply {'OK'}   {status} it has ended   {'NOT_FOUND'} no such job of the tenant
--       {'RUNNING'} a worker had claimed it: it gets no other start
local function move_start(tag, job, start, now)
  local waits = later.holds(job)
  if start <= now and not waits then return end
  dequeue(tag, job)
  job.deadline = job.deadline + math.max(start, now) - (waits and job.start or now)
  job.start = math.max(start, now)
  redis.call('ZADD', tag .. ':deadlines', job.deadline, job.id)
  enqueue(tag, job, start > now and later.stream(job) or tenant_stream(job),
    {'start', job.start, 'deadline', job.deadline, 'predicted', -1})
end

local function reprioritise(keys, argv)
  local tag, now = keys[1], now_ms()
  local job = load_job(tag, argv[1])
  if not job or job.tenant ~= argv[2] then return {'NOT_FOUND'} end
  if TERMINAL[job.state] then return {job.state} end
  running.write_back(tag, job)
  if argv[5] ~= '' then
    if job.epoch > 0 then return {'RUNNING'} end
    move_start(tag, job, tonumber(argv[5]), now)
  end
  if argv[4] ~= '' then
    job.deadline = (later.holds(job) and job.start or now) + tonumber(argv[4])
    redis.call('HSET', job.key, 'deadline', job.deadline)
    redis.call('ZADD', tag .. ':deadlines', job.deadline, job.id)
  end
  if job.owner ~= '' then
    local lane = argv[3] ~= '' and argv[3] or job.lane
    redis.call('PUBLISH', tag .. ':ctl:' .. job.owner,
      'moved ' .. job.id .. ' ' .. lane .. ' ' .. job.deadline - now)
  end
  if argv[3] == '' or argv[3] == job.lane then
    if argv[4] ~= '' and job.state == 'queued' and ledger.is_in_tenant_queue(job) then
      dequeue(tag, job)
      enqueue(tag, job, job.stream)
    end
    return {'OK'}
  end
  admission.reprice(tag, job, argv[3], now)
  if job.state == 'queued' then
    local suspect, waits = string.find(job.stream, ':suspect$'), later.holds(job)
    dequeue(tag, job)
    fairness.move(tag, job, argv[3], suspect)
    job.lane = argv[3]
    redis.call('HSET', job.key, 'lane', job.lane, 'predicted', -1)
    enqueue(tag, job, (suspect or waits) and job.stream or tenant_stream(job))
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
