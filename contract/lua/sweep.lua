-- sweep: what time has done. Anyone may call it.
-- A lapsed lease gives its job back (the second time to be run alone); a passed deadline ends its
-- job; a job whose callers have all gone is cancelled; a job whose retention is over is forgotten.
-- Once a second it also holds counters and lists against some records (_recount.lua).
-- The first sweep of a Redis that has been restarted renews what lapsed meanwhile: nobody could beat
-- while it was away.
-- KEYS  1 tag
-- ARGV  1 jobs of each kind at most  2 grace after a restart (ms)
--       3 '1': counters and lists are looked at too (absent: callers of the version before)
-- reply {leases lapsed, jobs expired, jobs unattended, jobs forgotten}, and with ARGV 3
--       {{'lane', 'line', 'tenant' or 'list', key after the tag, field or member, what it held, what
--       it holds now}, …}

-- True where another server process was swept last: all whose time ran on meanwhile get a grace.
local function booted(tag, now, grace_ms)
  local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local before = redis.call('GET', tag .. ':runid')
  if before == run_id then return false end
  redis.call('SET', tag .. ':runid', run_id)
  if not before then return false end
  for _, set in ipairs({':leases', ':attended'}) do
    local late = redis.call('ZRANGE', tag .. set, '-inf', now + grace_ms, 'BYSCORE')
    for _, id in ipairs(late) do redis.call('ZADD', tag .. set, now + grace_ms, id) end
  end
  return true
end

local function due(tag, set, now, limit)
  return redis.call('ZRANGE', tag .. set, '-inf', now, 'BYSCORE', 'LIMIT', 0, limit)
end

-- Ends the jobs in a set whose time has come.
local function end_due(tag, set, status, now, limit)
  local ids = due(tag, set, now, limit)
  for _, id in ipairs(ids) do
    local job = load_job(tag, id)
    if job and not TERMINAL[job.state] then
      terminate(tag, job, status, now)
    else
      if not job then forget_half(tag, id) end
      redis.call('ZREM', tag .. set, id)
    end
  end
  return #ids
end

-- Their records may have expired by themselves a moment ago.
local function forget_due(tag, now, limit)
  local entries = due(tag, ':kept', now, limit)
  for _, entry in ipairs(entries) do
    local id, has_objects, tenant = string.match(entry, '^(%S+) ([01]) (.*)$')
    forget(tag, id, tenant, has_objects == '1', entry)
  end
  return #entries
end

local function sweep(keys, argv)
  local tag, now, limit = keys[1], now_ms(keys[1]), argv[1]
  if booted(tag, now, tonumber(argv[2])) then return {0, 0, 0, 0, argv[3] and {} or nil} end
  local expired = end_due(tag, ':deadlines', 'expired', now, limit)
  local unattended = end_due(tag, ':attended', 'cancelled', now, limit)
  local lapsed = due(tag, ':leases', now, limit)
  for _, id in ipairs(lapsed) do
    local job = load_job(tag, id)
    if job and (job.state == 'claimed' or job.state == 'streaming') then
      redis.call('HSET', job.key, 'lapses', job.lapses + 1)
      if job.lapses == 0 then give_back(tag, job) else isolate(tag, job) end
    else
      redis.call('ZREM', tag .. ':leases', id)
    end
  end
  local forgotten = forget_due(tag, now, limit)
  local corrections = argv[3] and recount.some(tag, now) or nil
  return {#lapsed, expired, unattended, forgotten, corrections}
end
redis.register_function{
  function_name = 'batchway_v1_sweep', callback = sweep, flags = {'allow-oom'},
}
