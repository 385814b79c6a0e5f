-- sweep: applies what has become due; any process may call it.
-- Requeues jobs with lapsed leases (the second time as suspects), expires jobs after their deadline,
-- cancels jobs without a caller, queues jobs whose start has come, forgets jobs after their retention.
-- After a restart of Redis leases and attendance lapse only after a grace, as nobody could renew them before.
-- KEYS  1 tag
-- ARGV  1 jobs at most  2 grace after a restart (ms)
-- reply {leases lapsed, jobs expired, jobs unattended, jobs whose start has come, jobs forgotten}

-- The time (ms) before which no lease and no attendance lapses.
local function end_of_grace(tag, now, grace_ms)
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local before, until_ms = string.match(redis.call('GET', tag .. ':runid') or '', '^(%S+) (%d+)$')
  if before ~= run_id then
    until_ms = before and now + grace_ms or now
    redis.call('SET', tag .. ':runid', string.format('%s %d', run_id, until_ms))
  end
  return tonumber(until_ms)
end

local function due(tag, set, now, limit)
  return redis.call('ZRANGE', tag .. set, '-inf', now, 'BYSCORE', 'LIMIT', 0, limit)
end

-- Calls `act` for each due job in a set, whose entries are ids, or numbers and ids; a job on which it
-- raises is forgotten. `act` returns whether the job has left the set. Returns the number of due jobs.
local function each_due(tag, set, now, limit, act)
  local entries = due(tag, set, now, limit)
  for _, entry in ipairs(entries) do
    local id = string.match(entry, '^%d* ?(%S+)$') or entry
    local has_left, is_done = try(act, id)
    if not is_done then forget_unreadable(tag, id) end
    if not has_left then redis.call('ZREM', tag .. set, entry) end
  end
  return #entries
end

-- Ends the due jobs in a set.
local function end_due(tag, set, status, now, limit)
  return each_due(tag, set, now, limit, function(id)
    local job = load_job(tag, id)
    if job and not TERMINAL[job.state] then
      terminate(tag, job, status, now)
      return true
    end
    if not job then forget_unreadable(tag, id) end
  end)
end

-- Requeues the jobs whose leases have lapsed.
local function requeue_lapsed(tag, now, limit)
  return each_due(tag, ':leases', now, limit, function(id)
    local job = load_job(tag, id)
    if job and (job.state == 'claimed' or job.state == 'streaming') then
      redis.call('HSET', job.key, 'lapses', job.lapses + 1)
      -- What runs flows runs no engine that a job could kill.
      requeue(tag, job, job.lapses > 0 and not is_flow(job))
      return true
    end
  end)
end

-- Moves the jobs whose start has come to the queues of their tenants.
local function begin_due(tag, now, limit)
  return each_due(tag, ':later', now, limit, function(id)
    local job = load_job(tag, id)
    if job and later.holds(job) then
      dequeue(tag, job)
      enqueue(tag, job, tenant_stream(job))
      return true
    end
  end)
end

-- Forgets jobs after their retention; their records may have expired already.
local function forget_due(tag, now, limit)
  local entries = due(tag, ':kept', now, limit)
  for _, entry in ipairs(entries) do
    local id, has_objects, tenant = string.match(entry, '^(%S+) ([01]) (.*)$')
    if id then
      forget(tag, id, tenant, has_objects == '1', entry)
    else
      redis.call('ZREM', tag .. ':kept', entry)
    end
  end
  return #entries
end

local function sweep(keys, argv)
  local tag, now, room = keys[1], now_ms(), tonumber(argv[1])
  local is_grace = now < end_of_grace(tag, now, tonumber(argv[2]))
  local expired = end_due(tag, ':deadlines', 'expired', now, room)
  room = room - expired
  local unattended = end_due(tag, ':attended', 'cancelled', now, is_grace and 0 or room)
  room = room - unattended
  local lapsed = requeue_lapsed(tag, now, is_grace and 0 or room)
  local begun = begin_due(tag, now, room - lapsed)
  return {lapsed, expired, unattended, begun, forget_due(tag, now, room - lapsed - begun)}
end

register('sweep', sweep, 'allow-oom')
