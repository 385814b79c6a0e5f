-- Holds what is counted and listed beside the jobs' records against the records, some jobs in each
-- sweep, and sets right what differs. As every function is all or nothing, nothing should.
--
-- Counted are a lane (`counters`), a tenant's line in it (`jobs` and `tokens` of `line`) and what a
-- tenant has `reserved`. Jobs come, move and go while a count goes on over many sweeps. So it takes the
-- unfinished jobs in the order of their deadlines: `recount:place` says up to which deadline they are
-- in the count, `recount:sums` what those add up to. Whoever changes a counter by a job that is in the
-- count changes the sum as much (recount.has, recount.add), and a job whose deadline moves past the
-- place takes its share along (recount.move). So the sums are right for the jobs in the count at every
-- moment. Once all jobs are in it, each sum must equal its counter; they are compared some at a time,
-- while both go on changing alike. Where a sweep can take all jobs at once, it counts and compares
-- them, and no sum is kept.
-- A lane or tenant without unfinished jobs has the sum 0 where a job of it that has ended is still
-- kept, or one was refused (recount.expect).
--
-- Listed is each job in its tenant's list; an unfinished one in `deadlines`, one that has ended in
-- `kept`; one that waits, in its stream; one that runs, in `leases` and among its owner's. `deadlines`
-- is looked through with the count; where it was wrong, the count begins anew. `kept` is looked through
-- from a cursor, and so are, before each count, the lists of the tenants that the last one met: what
-- is not in `deadlines` would not be counted. An unfinished job that lacks what it takes to run it is
-- forgotten: every function would fail on it.
--
-- The cost of a sweep is bounded by RECOUNT_JOBS of each of the three, and as many sums. A few more
-- come where several jobs have the very same deadline, and where Redis keeps a small set or hash, of up
-- to 128 members, as one piece.

local COUNTED = {counters = true, line = true, tenant = true}
local RECOUNT_JOBS = 50  -- that a sweep takes
local RECOUNT_GAP_MS = 1000  -- between two sweeps that recount, whoever calls them
local ALL = '9007199254740992'  -- 2^53, a place behind every deadline
local EXPIRY_MS = 1000  -- a record may be gone so long before it is to be forgotten

-- A cursor that was kept, or the first.
local function cursor_of(tag, field)
  local kept = redis.call('HGET', tag .. ':recount:place', field) or '0'
  return string.find(kept, '^%d+$') and #kept < 20 and kept or '0'
end

-- Up to which deadline jobs are in the count; below all of them while none is.
function recount.position(tag)
  return whole_number(redis.call('HGET', tag .. ':recount:place', 'deadline') or -1) or -1
end

-- Whether a job with this deadline is in the count.
function recount.includes(tag, deadline)
  return deadline <= recount.position(tag)
end

-- Adds shares to the sums so many times: {sum, value, …}. A sum is named after its key and field.
function recount.add(tag, shares, times)
  for i = 1, #shares, 2 do
    -- + 0 makes a negative zero a plain one, which Redis 7.0 would refuse as no integer.
    redis.call('HINCRBY', tag .. ':recount:sums', shares[i], times * shares[i + 1] + 0)
  end
end

-- A job gets another deadline.
function recount.move(tag, job, deadline)
  local was, is = recount.includes(tag, job.deadline), recount.includes(tag, deadline)
  if was ~= is then recount.add(tag, ledger.contributions(job), is and 1 or -1) end
end

-- Has what is counted of a job's lane, tenant and line compared, though no job of theirs be found.
function recount.include_sums(tag, job)
  local sums = ledger.zero_sums(job)
  if redis.call('HEXISTS', tag .. ':recount:sums', sums[#sums - 1]) == 0 then
    recount.add(tag, sums, 0)
  end
end

-- A correction: {kind, key after the tag, field or member, what it held, what it holds}.
local function add_correction(found, kind, key, field, held, holds)
  table.insert(found, {kind, key, field, tostring(held or 'nothing'), tostring(holds or 'nothing')})
end

local function add_local(sums, shares, times)
  for i = 1, #shares, 2 do sums[shares[i]] = (sums[shares[i]] or 0) + times * shares[i + 1] end
end

-- Lists an unfinished job, that stands in `deadlines`, where else it belongs.
local function list_unfinished(tag, job, now, found)
  local list = 'jobs:' .. job.tenant
  if redis.call('ZADD', tag .. ':' .. list, 'NX', job.created, job.id) == 1 then
    add_correction(found, 'list', list, job.id, nil, job.created)
  end
  if job.state == 'queued' then
    local key = tag .. ':' .. job.stream
    if #redis.call('XRANGE', key, job.entry, job.entry) == 0 then
      local entry = add_entry(key, job)
      redis.call('HSET', job.key, 'entry', entry)
      add_correction(found, 'list', job.stream, job.id, nil, entry)
    end
    return
  end
  if redis.call('ZADD', tag .. ':leases', 'NX', now, job.id) == 1 then
    add_correction(found, 'list', 'leases', job.id, nil, now)
  end
  if redis.call('SADD', tag .. ':own:' .. job.owner, job.id) == 1 then
    add_correction(found, 'list', 'own:' .. job.owner, job.id, nil, job.id)
  end
end

-- Takes the next jobs into the count. Returns the new place; nil where `deadlines` was wrong.
local function count_some(tag, now, limit, sums, found)
  local deadlines = tag .. ':deadlines'
  local after = string.format('(%d', recount.position(tag))
  local rows = redis.call('ZRANGE', deadlines, after, '+inf', 'BYSCORE', 'LIMIT', 0, limit,
    'WITHSCORES')
  local place = ALL
  if #rows == 2 * limit then
    place = rows[#rows]
    rows = redis.call('ZRANGE', deadlines, after, place, 'BYSCORE', 'WITHSCORES')
  end
  for i = 1, #rows, 2 do
    local id, job = rows[i], load_job(tag, rows[i])
    if not job or TERMINAL[job.state] then
      redis.call('ZREM', deadlines, id)
      if not job then forget_unreadable(tag, id) end
      add_correction(found, 'list', 'deadlines', id, rows[i + 1], nil)
      place = nil
    elseif job.deadline ~= tonumber(rows[i + 1]) then
      redis.call('ZADD', deadlines, job.deadline, id)
      add_correction(found, 'list', 'deadlines', id, rows[i + 1], job.deadline)
      place = nil
    else
      add_local(sums, ledger.contributions(job), 1)
      list_unfinished(tag, job, now, found)
    end
  end
  return place
end

-- Holds a counter against its sum.
local function compare(tag, name, sum, found)
  local key, field = string.match(name, '^(%a+:[^:]*.*) (%S+)$')
  if not key or not COUNTED[string.match(key, '^%a+')]
    or string.find(key, '^line:') and not string.find(key, '^line:[^:]*:[^:]*:') then
    redis.call('HDEL', tag .. ':recount:sums', name)  -- no function has written this
    return
  end
  local kind, held = string.match(key, '^%a+'), redis.call('HGET', tag .. ':' .. key, field)
  if kind == 'tenant' then redis.call('ZADD', tag .. ':recount:lists', 'NX', 0, string.sub(key, 8)) end
  if tonumber(held or 0) ~= sum then
    ledger.correct(tag, key, field, sum, tonumber(held or 0))
    add_correction(found, kind == 'counters' and 'lane' or kind, key, field, held, sum)
  end
  if kind == 'line' and field == 'jobs' then
    local model, lane, tenant = string.match(key, '^line:([^:]*):([^:]*):(.*)$')
    local active = lane_key(tag, 'active', model, lane)
    local score = redis.call('ZSCORE', active, tenant)
    if sum > 0 and not score then fairness.activate(tag, model, lane, tenant) end
    if sum == 0 and score then fairness.deactivate(tag, model, lane, tenant) end
    if (sum > 0) ~= (score and true or false) then
      add_correction(found, 'line', string.format('active:%s:%s', model, lane), tenant, score,
        redis.call('ZSCORE', active, tenant))
    end
  end
end

local function compare_some(tag, limit, found)
  local place, sums = tag .. ':recount:place', tag .. ':recount:sums'
  local cursor = cursor_of(tag, 'compared')
  local reply = redis.call('HSCAN', sums, cursor, 'COUNT', limit)
  for i = 1, #reply[2], 2 do compare(tag, reply[2][i], whole_number(reply[2][i + 1]) or 0, found) end
  if reply[1] == '0' then return true end
  redis.call('HSET', place, 'compared', reply[1])
end

-- Looks through jobs that have ended; their lanes and tenants get a sum.
local function check_kept(tag, now, limit, sums, found)
  local place = tag .. ':recount:place'
  local reply = redis.call('ZSCAN', tag .. ':kept', cursor_of(tag, 'kept'), 'COUNT', limit)
  if reply[1] ~= '0' then
    redis.call('HSET', place, 'kept', reply[1])
  else
    redis.call('HDEL', place, 'kept')
  end
  for i = 1, #reply[2], 2 do
    local entry, score = reply[2][i], tonumber(reply[2][i + 1])
    local id, has_objects, tenant = string.match(entry, '^(%S+) ([01]) (.*)$')
    local state, model, lane, created
    if id then
      state, model, lane, created =
        unpack(redis.call('HMGET', tag .. ':job:' .. id, 'state', 'model', 'lane', 'created'))
    end
    if not id then
      redis.call('ZREM', tag .. ':kept', entry)  -- no function has written this
      add_correction(found, 'list', 'kept', entry, score, nil)
    elseif not state and score > now + EXPIRY_MS then
      forget(tag, id, tenant, has_objects == '1', entry)
      add_correction(found, 'list', 'kept', entry, score, nil)
    elseif state and not TERMINAL[state] then
      redis.call('ZREM', tag .. ':kept', entry)
      add_correction(found, 'list', 'kept', entry, score, nil)
    elseif model and lane and created then
      add_local(sums, ledger.zero_sums({tenant = tenant, model = model, lane = lane}), 0)
      if redis.call('ZADD', tag .. ':jobs:' .. tenant, 'NX', created, id) == 1 then
        add_correction(found, 'list', 'jobs:' .. tenant, id, nil, created)
      end
    end
  end
end

-- Looks at some entries of a tenant's list: each needs a record, and a place in `deadlines` or `kept`.
-- Returns the cursor to go on from, '0' at the end, and how many were looked at.
local function check_list(tag, tenant, cursor, limit, found)
  local list = 'jobs:' .. tenant
  local reply = redis.call('ZSCAN', tag .. ':' .. list, cursor, 'COUNT', limit)
  for i = 1, #reply[2], 2 do
    local id = reply[2][i]
    local state, deadline, finished, ttl_ms, has_objects = unpack(redis.call('HMGET',
      tag .. ':job:' .. id, 'state', 'deadline', 'finished', 'ttl_ms', 'has_objects'))
    local entry = kept_entry({id = id, has_objects = has_objects == '1', tenant = tenant})
    if not state then
      local other = kept_entry({id = id, has_objects = true, tenant = tenant})
      if not redis.call('ZSCORE', tag .. ':kept', entry)
        and not redis.call('ZSCORE', tag .. ':kept', other) then
        redis.call('ZREM', tag .. ':' .. list, id)
        add_correction(found, 'list', list, id, reply[2][i + 1], nil)
      end
    elseif TERMINAL[state] then
      local until_ms = (finished or 0) + (ttl_ms or 0)
      if redis.call('ZADD', tag .. ':kept', 'NX', until_ms, entry) == 1 then
        add_correction(found, 'list', 'kept', entry, nil, until_ms)
      end
    elseif redis.call('ZADD', tag .. ':deadlines', 'NX', deadline or 0, id) == 1 then
      add_correction(found, 'list', 'deadlines', id, nil, deadline)
    end
  end
  return reply[1], #reply[2] / 2
end

-- Looks at the lists of the tenants that the last count met. True once it has seen all of them.
local function check_lists(tag, limit, found)
  local lists, place = tag .. ':recount:lists', tag .. ':recount:place'
  local cursor = cursor_of(tag, 'listed')
  while limit > 0 do
    local tenant = redis.call('ZRANGE', lists, 0, 0)[1]
    if not tenant then
      redis.call('HDEL', place, 'listed')
      return true
    end
    local num_seen
    cursor, num_seen = check_list(tag, tenant, cursor, limit, found)
    limit = limit - math.max(1, num_seen)
    if cursor == '0' then redis.call('ZREM', lists, tenant) end
  end
  redis.call('HSET', place, 'listed', cursor)
  return false
end

-- Counts and compares some more; the count begins where none is under way.
local function count(tag, now, limit, sums, found)
  local place = tag .. ':recount:place'
  local before = redis.call('HGET', place, 'deadline')
  local reached = before == ALL and ALL or count_some(tag, now, limit, sums, found)
  local is_over = not reached
  if reached == ALL and not before and redis.call('EXISTS', tag .. ':recount:sums') == 0 then
    for name, sum in pairs(sums) do compare(tag, name, sum, found) end
  elseif reached then
    redis.call('HSET', place, 'deadline', reached)
    for name, sum in pairs(sums) do recount.add(tag, {name, sum}, 1) end
    if reached == ALL then is_over = compare_some(tag, limit, found) end
  end
  if is_over then
    redis.call('HDEL', place, 'deadline', 'compared')
    redis.call('DEL', tag .. ':recount:sums')
  end
end

-- Looks at some entries of the lists, then goes on with the count; returns all corrections.
function recount.step(tag, now)
  local limit, place, found, sums = RECOUNT_JOBS, tag .. ':recount:place', {}, {}
  local wait = (whole_number(redis.call('HGET', place, 'next') or 0) or 0) - now
  if wait > 0 and wait <= RECOUNT_GAP_MS then return found end
  redis.call('HSET', place, 'next', now + RECOUNT_GAP_MS)
  check_kept(tag, now, limit, sums, found)
  local is_under_way = redis.call('HEXISTS', place, 'deadline') == 1
  if is_under_way or check_lists(tag, limit, found) then
    count(tag, now, limit, sums, found)
  else
    for name in pairs(sums) do recount.add(tag, {name, 0}, 1) end
  end
  for _, correction in ipairs(found) do
    redis.call('HINCRBY', tag .. ':corrections', correction[1], 1)
  end
  return found
end
