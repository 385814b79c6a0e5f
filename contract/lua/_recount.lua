-- Checks counters and lists against the jobs' records, a few jobs in each sweep, and corrects
-- differences. Functions are atomic, so only outside changes to Redis cause differences.
--
-- Counters: of a lane (`counters`), of a tenant's queue in it (`jobs` and `tokens` of `line`) and of a
-- tenant (`reserved`). A count takes many sweeps while jobs come, move and go, so it visits unfinished
-- jobs in order of deadline. `recount:place` holds the position, the last deadline counted, and
-- `recount:sums` the sums over the counted jobs. A function that changes a counter for a counted job
-- changes the sum too (recount.includes, recount.add), also when a deadline moves across the position
-- (recount.move). When all jobs are counted, each sum must equal its counter; sweeps compare some at a
-- time. A sweep that can count all jobs at once compares directly and stores no sums. A lane or tenant
-- without unfinished jobs has the sum 0 after a job that is still kept or a refusal
-- (recount.include_sums).
--
-- Lists: every job is in its tenant's list, an unfinished job in `deadlines`, an ended one in `kept`, a
-- waiting one in its stream, a running one in `leases` and its owner's set. The count checks
-- `deadlines` and starts again after a correction there. Cursors go through `kept` and, before each
-- count, through the lists of the tenants in the last count, because a job missing from `deadlines`
-- would not be counted. Unfinished jobs with unreadable records are forgotten.
--
-- A sweep handles at most RECOUNT_JOBS of each kind, plus jobs with equal deadlines and small sets and
-- hashes (up to 128 members), which Redis returns whole.

local COUNTED = {counters = true, line = true, tenant = true}
local RECOUNT_JOBS = 50  -- of each kind in a sweep
local RECOUNT_GAP_MS = 1000  -- between two sweeps that recount
local ALL = '9007199254740992'  -- 2^53, later than every deadline
local EXPIRY_MS = 1000  -- a record may expire this long before its entry in `kept` is due

-- A stored cursor; '0' where there is none.
local function cursor_of(tag, field)
  local kept = redis.call('HGET', tag .. ':recount:place', field) or '0'
  return string.find(kept, '^%d+$') and #kept < 20 and kept or '0'
end

-- The last deadline counted; -1 where no count is under way.
function recount.position(tag)
  return whole_number(redis.call('HGET', tag .. ':recount:place', 'deadline') or -1) or -1
end

-- Whether a job with this deadline is counted.
function recount.includes(tag, deadline)
  return deadline <= recount.position(tag)
end

-- Adds `times` the values {sum, value, …} to the sums. A sum is named after its key and field.
function recount.add(tag, shares, times)
  for i = 1, #shares, 2 do
    -- + 0 turns -0 into 0; Redis 7.0 refuses -0.
    redis.call('HINCRBY', tag .. ':recount:sums', shares[i], times * shares[i + 1] + 0)
  end
end

-- Called before a job's deadline changes.
function recount.move(tag, job, deadline)
  local was, is = recount.includes(tag, job.deadline), recount.includes(tag, deadline)
  if was ~= is then recount.add(tag, ledger.contributions(job), is and 1 or -1) end
end

-- Includes the counters of a job's lane, tenant queue and tenant in the comparison.
function recount.include_sums(tag, job)
  local sums = ledger.zero_sums(job)
  if redis.call('HEXISTS', tag .. ':recount:sums', sums[#sums - 1]) == 0 then
    recount.add(tag, sums, 0)
  end
end

-- Adds a correction: {kind, key after the tag, field or member, old value, new value}.
local function add_correction(found, kind, key, field, held, holds)
  table.insert(found, {kind, key, field, tostring(held or 'nothing'), tostring(holds or 'nothing')})
end

local function add_local(sums, shares, times)
  for i = 1, #shares, 2 do sums[shares[i]] = (sums[shares[i]] or 0) + times * shares[i + 1] end
end

-- Adds an unfinished job to the lists that lack it, other than `deadlines`.
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

-- Counts the next jobs. Returns the new position; nil after a correction of `deadlines`.
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

-- Compares a counter with its sum.
local function compare(tag, name, sum, found)
  local key, field = string.match(name, '^(%a+:[^:]*.*) (%S+)$')
  if not key or not COUNTED[string.match(key, '^%a+')]
    or string.find(key, '^line:') and not string.find(key, '^line:[^:]*:[^:]*:') then
    redis.call('HDEL', tag .. ':recount:sums', name)  -- not written by these functions
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

-- Checks entries of `kept`; includes the lanes and tenants of ended jobs in the sums.
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
      redis.call('ZREM', tag .. ':kept', entry)  -- not written by these functions
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

-- Checks entries of a tenant's list: each needs a record and an entry in `deadlines` or `kept`. Returns
-- the next cursor, '0' at the end, and the number of entries checked.
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

-- Checks the lists of the tenants in the last count. True when all are checked.
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

-- Continues the count and the comparison, or starts a count.
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

-- Checks some list entries and continues the count; returns the corrections.
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
