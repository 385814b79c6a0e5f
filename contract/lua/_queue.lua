-- Finds the next waiting job that fits and claims it, out of order where jobs before it do not fit.
-- All entries up to the consumer group's last delivered id are claimed; later claimed ones are pending.
-- requires shared, residence

local MAX_PASSED = 8   -- jobs that may be claimed ahead of a job that waits in front of them
local MAX_AHEAD = 6    -- jobs of one stream that are looked at for one that the worker holds
local MAX_SKIPPED = 4  -- jobs of one stream that a search passes over
local WINDOW = 16      -- entries that a search reads
local FAIR_WINDOW = 64     -- entries that a search reads for tenants below their share
local MAX_TENANTS = 8  -- of a lane, whose queues are searched, or read at once
local ALL_TENANTS = 256  -- that are looked at: most may have no job for an arm (_ab.lua)

-- The last delivered id of a queue stream; makes its consumer group where it is lost.
function queue.last_delivered(key)
  local group = redis.call('XINFO', 'GROUPS', key)[1]
  if not group then redis.call('XGROUP', 'CREATE', key, GROUP, '0') end
  for i = 1, #(group or ''), 2 do
    if group[i] == 'last-delivered-id' then return group[i + 1] end
  end
  return '0-0'
end

-- A stream's first job that no worker has; nil: there is none.
function queue.first_waiting(key)
  if redis.call('EXISTS', key) == 0 then return nil end
  local first = redis.call('XRANGE', key, '(' .. queue.last_delivered(key), '+', 'COUNT', 1)[1]
  return first and first[2][2]
end

-- Iterates over at most so many entries of a stream behind an id. Reads the first one by itself, because
-- it mostly fits, then a few, then more at a time.
local function entries_behind(key, id, most)
  local entries, i = {}, 0
  return function()
    i = i + 1
    if not entries[i] and i <= most then
      local few = i == 1 and 1 or MAX_SKIPPED - 1
      local count = math.min(i <= MAX_SKIPPED and few or WINDOW, most - i + 1)
      local more = redis.call('XRANGE', key, '(' .. (i == 1 and id or entries[i - 1][1]), '+', 'COUNT', count)
      for _, entry in ipairs(more) do table.insert(entries, entry) end
    end
    return entries[i]
  end
end

-- Removes an entry whose job cannot run.
local function discard_entry(key, entry)
  redis.call('XACK', key, GROUP, entry)
  redis.call('XDEL', key, entry)
  if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
end

-- A tenant's jobs of a lane go by their places, then as they came: by priority, the lowest first, then by the
-- second of their deadline. Its stream has them as they came; those with a priority, and those that go before
-- one that was there, are also in the sorted set `early`, by place.
local SECONDS = 2 ^ 34  -- until the year 2514; with a priority of 20 bits it makes a number that is exact

local function place_at(priority, deadline)
  return priority * SECONDS + math.min(math.floor(deadline / 1000), SECONDS - 1)
end

local function place_of(tag, id)
  local record = redis.call('HMGET', tag .. ':job:' .. id, 'priority', 'deadline')
  return place_at(whole_number(record[1] or 0) or 0, whole_number(record[2] or 0) or 0)
end

-- The first waiting job of a stream with room for one of its choices (the others can wait in the
-- engine): {key, entry, id, cost, choices, is_first}; nil; false: none waits there.
-- Adds ids of jobs that do not fit to `skipped`. The second result is one of them that was passed over
-- MAX_PASSED times: no job behind it may be claimed.
-- With `fair` (see fairness.parse_slots) the room is what is left of each tenant's share; the result
-- names the tenant, and jobs of tenants without room are ignored. So are `paused` ones (pauses.find);
-- where it met any, or only those that workers have, the search goes on behind its window.
-- With `look` (residence.look) jobs are left that other workers hold the content of; and where such a one has
-- no room, a job behind it goes first that this worker holds, within MAX_AHEAD.
function queue.find_fit(tag, key, room, skipped, fair, paused, look)
  if redis.call('EXISTS', key) == 0 then return false end
  local most, num_skipped, num_ahead, is_front = fair and FAIR_WINDOW or WINDOW, 0, 0, true
  local behind = paused and paused.behind[key]
  local last, is_first, other = behind or queue.last_delivered(key), not behind, nil
  repeat
    local num_read, num_paused, num_taken = 0, 0, 0
    for entry in entries_behind(key, last, most) do
      num_read, last = num_read + 1, entry[1]
      local _, id, _, cost_text, _, lane, _, tenant = unpack(entry[2])
      local cost, is_paused = whole_number(cost_text), pauses.hold(paused, lane or '', tenant or '')
      local job = is_paused and {} or redis.call('HMGET', tag .. ':job:' .. id, 'state', 'entry', 'passed',
        'choices', 'tenant', look and 'marks' or 'state')
      local choices = math.max(1, whole_number(job[4] or 1) or 1)
      local is_here = is_paused or cost and job[1] and job[2] == entry[1]
      if fair then room = fairness.tenant_room(tag, fair, job[5] or '') end
      is_front = is_front and is_paused
      if is_front then paused.behind[key] = last end
      if not is_here then
        discard_entry(key, entry[1])
      elseif is_paused then
        num_paused, is_first = num_paused + 1, false
      elseif job[1] == 'queued' and cost / choices <= room then
        local marks = look and job[6]
        local found = {key = key, entry = entry[1], id = id, cost = cost, choices = choices, marks = marks,
          is_first = is_first,
          tenant = fair and job[5]}
        local where = marks and residence.judge(look, id, marks)
        if other and where == 'here' and place_of(tag, id) == place_of(tag, other.id) then
          table.insert(skipped, other.id)
          return found
        elseif not other and where ~= 'left' then
          if where ~= 'elsewhere' or tonumber(job[3] or 0) >= MAX_PASSED then return found end
          other = found
        end
        num_ahead, is_first = num_ahead + 1, false
        if other and num_ahead >= MAX_AHEAD then return other end
      elseif job[1] ~= 'queued' then
        num_taken = num_taken + 1
      elseif fair and room <= 0 then
        is_first = false
      else
        if other then return other end
        if tonumber(job[3] or 0) >= MAX_PASSED then return nil, id end
        table.insert(skipped, id)
        num_skipped, is_first = num_skipped + 1, false
        if num_skipped == MAX_SKIPPED then return nil end
      end
    end
  until other or num_paused == 0 and num_taken < most or num_read < most
  if other then return other end
  if num_ahead > 0 then return nil end
  if num_skipped == 0 then return false end
end

-- What `find` returns for the first of a lane's tenants, by their counters, for which it returns
-- anything; false: nothing of the tenant waits there.
function queue.first_of_tenants(tag, model, lane, paused, find)
  local active, first, num_looks, num_searched = lane_key(tag, 'active', model, lane), 0, 0, 0
  repeat
    local tenants = redis.call('ZRANGE', active, first, first + MAX_TENANTS - 1)
    for _, tenant in ipairs(tenants) do
      if not pauses.hold(paused, lane, tenant) then
        local found, is_blocked = find(tenant)
        if found or is_blocked then return found, is_blocked end
        num_looks, num_searched = num_looks + 1, num_searched + (found == nil and 1 or 0)
        if num_looks == ALL_TENANTS or num_searched == MAX_TENANTS then return nil end
      end
    end
    first = first + MAX_TENANTS
  until #tenants < MAX_TENANTS
end

local function early_key(tag, stream)
  return tag .. ':early:' .. stream
end

local function arrival(job)
  local ms, number = string.match(job.entry, '^(%d+)-(%d+)$')
  return string.format('%015d-%09d %s', ms, number, job.id)
end

-- How many of a stream's waiting jobs go before a new one: of those that are not early, where the first of
-- them does all, and of those that are. `latest`: the last place among them.
function queue.count_before(tag, stream, priority, deadline, latest, num_jobs)
  local place, early = place_at(priority, deadline), early_key(tag, stream)
  local num_early = redis.call('ZCARD', early)
  local num_others = math.max(0, num_jobs - num_early)
  if place >= latest then return num_others, num_early end
  local first = priority == 0 and queue.first_waiting(tag .. ':' .. stream)
  local is_behind = priority > 0 or first and place_of(tag, first) <= place
  return is_behind and num_others or 0, redis.call('ZCOUNT', early, '-inf', place)
end

-- How many early jobs go before a waiting one.
function queue.count_early(tag, job)
  local early = early_key(tag, job.stream)
  local place = string.format('(%.0f', place_at(job.priority, job.deadline))
  return redis.call('ZRANK', early, arrival(job)) or redis.call('ZCOUNT', early, '-inf', place)
end

-- Notes a job that comes to its tenant's queue, which had so many. Returns how many go before it that are
-- not early.
function queue.arrive(tag, job, num_jobs)
  local line, place = ledger.tenant_queue_key(tag, job), place_at(job.priority, job.deadline)
  local latest = whole_number(redis.call('HGET', line, 'latest') or 0) or 0
  local num_before = queue.count_before(tag, job.stream, job.priority, job.deadline, latest, num_jobs)
  if place >= latest then redis.call('HSET', line, 'latest', place) end
  if place < latest or job.priority ~= 0 then
    redis.call('ZADD', early_key(tag, job.stream), place, arrival(job))
  end
  return num_before
end

-- Whether the job was early.
function queue.leave(tag, job)
  return redis.call('ZREM', early_key(tag, job.stream), arrival(job)) == 1
end

-- The first of a stream's jobs that are early and fit, as find_fit.
local function find_early(tag, key, room, skipped, look)
  local early = early_key(tag, string.sub(key, #tag + 2))
  for i, member in ipairs(redis.call('ZRANGE', early, 0, MAX_SKIPPED - 1)) do
    local id = string.match(member, '%S+$')
    local job = redis.call('HMGET', tag .. ':job:' .. id, 'state', 'entry', 'passed', 'choices', 'cost',
      look and 'marks' or 'state')
    local choices, cost = math.max(1, whole_number(job[4] or 1) or 1), whole_number(job[5])
    if job[1] ~= 'queued' or not job[2] or not cost then
      redis.call('ZREM', early, member)
    elseif cost / choices <= room then
      if not look or not job[6] or residence.judge(look, id, job[6]) ~= 'left' then
        return {key = key, entry = job[2], id = id, cost = cost, choices = choices,
          marks = look and job[6], is_first = false}
      end
    elseif tonumber(job[3] or 0) >= MAX_PASSED then
      return nil, id
    else
      table.insert(skipped, id)
      if i == MAX_SKIPPED then return nil end
    end
  end
  return false
end

-- The first of a stream's jobs by place that fits, as find_fit.
local function find_by_place(tag, key, room, skipped, look)
  local passed = {}
  local early, is_blocked = find_early(tag, key, room, skipped, look)
  if early == nil then return nil, is_blocked end
  local found, is_blocked = queue.find_fit(tag, key, room, early and passed or skipped, nil, nil, look)
  if not early then return found, is_blocked end
  local limit = place_of(tag, early.id)
  local function goes_first(id)
    return place_of(tag, id) <= limit
  end
  if is_blocked and goes_first(is_blocked) then return nil, is_blocked end
  for _, id in ipairs(passed) do
    if goes_first(id) then table.insert(skipped, id) end
  end
  return found and goes_first(found.id) and found or early
end

-- A tenant's next job that fits, as find_fit. `searched`: see ab.searched.
function queue.next_of_tenant(tag, model, lane, tenant, room, skipped, searched)
  local stream, nothing = lane_key(tag, 'q', model, lane) .. ':' .. tenant, false
  for _, stream_end in ipairs(searched) do
    local found, is_blocked = find_by_place(tag, stream .. stream_end, room, skipped,
      searched.look)
    if found or is_blocked then return found, is_blocked end
    if found == nil then nothing = nil end
  end
  return nothing
end

-- The next job of a lane that fits: returned jobs first, then tenants by their counters. As find_fit.
function queue.next_in_lane(tag, model, lane, room, skipped, searched, paused)
  local back = lane_key(tag, 'back', model, lane)
  local found, is_blocked = queue.find_fit(tag, back, room, skipped, nil, paused)
  if found or is_blocked then return found, is_blocked end
  return queue.first_of_tenants(tag, model, lane, paused, function(tenant)
    return queue.next_of_tenant(tag, model, lane, tenant, room, skipped, searched)
  end)
end

-- Marks an entry as pending; the first one also becomes the last delivered id.
local function mark_pending(found)
  if found.is_first then
    redis.call('XCLAIM', found.key, GROUP, CONSUMER, 0, found.entry, 'FORCE', 'JUSTID',
      'LASTID', found.entry)
  else
    redis.call('XCLAIM', found.key, GROUP, CONSUMER, 0, found.entry, 'FORCE', 'JUSTID')
  end
end

local MAX_RUNS_BYTES = 1024  -- of the last claims of a job

-- Claims a job that was found; nil where it has expired or cannot be read.
function queue.claim_job(tag, found, incarnation, lease_ms, now, config, keeps)
  mark_pending(found)
  local job = load_job(tag, found.id)
  if not job or job.stream ~= string.sub(found.key, #tag + 2) then
    discard_entry(found.key, found.entry)
    if not job then forget_unreadable(tag, found.id) end
    return nil
  end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return nil
  end
  if ledger.is_in_tenant_queue(job) then fairness.charge(tag, job) end
  ledger.start(tag, job)
  job.epoch, job.attempt = job.epoch + 1, job.attempt + 1
  local is_first = not job.claimed
  redis.call('HSET', job.key, 'state', 'claimed', 'owner', incarnation, 'epoch', job.epoch,
    'attempt', job.attempt, 'config', config, 'charged', job.charged, 'keeps', keeps and '1' or '',
    'claimed', job.claimed or now, 'runs', string.sub(string.format('%s%d %d %s\n', job.runs or '',
      now, job.next, incarnation), -MAX_RUNS_BYTES))
  if keeps and found.marks and string.sub(found.marks, 1, MARK) ~= NONE then
    residence.note(tag, job.model, incarnation, string.sub(found.marks, 1, MARK), now)
  end
  totals.claimed(tag, job, now, is_first)
  if is_first then ledger.calibrate(tag, job, now) end
  if is_first and job.callback_started == '1' then
    outbox.post(tag, job, 'started', now, '', '')
  end
  redis.call('ZADD', tag .. ':leases', now + lease_ms, job.id)
  redis.call('SADD', tag .. ':own:' .. incarnation, job.id)
  return claim_reply(tag, job, now)
end
