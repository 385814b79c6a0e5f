-- What jobs cost and hold. A job's cost (prompt + predicted output, tokens) is reserved by submit
-- and settled by terminal(): cost = charge + refund. The counters of a lane, of a tenant's line in
-- it and of the tenant always equal the sets that they count.

local LENGTHS_TTL_MS = 7 * 24 * 3600 * 1000
local TENANT_TTL_MS = 24 * 3600 * 1000
local MAX_CALIBRATIONS = 1000
local MIN_LENGTHS = 5  -- outputs seen before their length says anything

-- Whether the job waits in its tenant's own line: not given back, not under suspicion.
local function is_in_tenant_queue(job)
  return job.stream == 'q:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant
end

local function tenant_queue_key(tag, job)
  return tag .. ':line:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant
end

-- How much of a running job's cost is computed: the prompt, once there is output, and the output.
function ledger.done(job)
  if job.tokens == 0 then return 0 end
  return math.min(job.cost, job.prompt_tokens + job.tokens)
end

-- A lane's running jobs have so many more tokens of their costs computed.
function ledger.progress(tag, job, tokens)
  if tokens == 0 then return end
  redis.call('HINCRBY', tag .. ':counters:' .. job.model .. ':' .. job.lane, 'done_tokens', tokens)
end

local function count_in_tenant_queue(tag, job, sign)
  local line = tenant_queue_key(tag, job)
  local jobs = redis.call('HINCRBY', line, 'jobs', sign)
  if jobs == 0 then
    redis.call('DEL', line)
    fairness.deactivate(tag, job.model, job.lane, job.tenant)
    return
  end
  redis.call('HINCRBY', line, 'tokens', sign * job.cost)
  if sign < 0 then
    redis.call('HINCRBY', line, 'left_jobs', 1)
    redis.call('HINCRBY', line, 'left_tokens', job.cost)
  elseif jobs == 1 then
    fairness.activate(tag, job.model, job.lane, job.tenant)
  end
end

-- What a job adds to the counters, as one that is 'queued' or 'running': {key after the tag and
-- field, value, …}.
local function state_contributions(job, what)
  local lane = 'counters:' .. job.model .. ':' .. job.lane
  local added = {lane .. ' ' .. what .. '_jobs', 1, lane .. ' ' .. what .. '_tokens', job.cost}
  if what == 'running' then
    added[5], added[6] = lane .. ' done_tokens', ledger.done(job)
  elseif is_in_tenant_queue(job) then
    local line = 'line:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant
    added[5], added[6], added[7], added[8] = line .. ' jobs', 1, line .. ' tokens', job.cost
  end
  return added
end

local function reservation(job)
  return {'tenant:' .. job.tenant .. ' reserved', job.cost}
end

-- All that an unfinished job adds to counters.
function ledger.contributions(job)
  local added, reserved = state_contributions(job, job.state == 'queued' and 'queued' or 'running'), reservation(job)
  table.insert(added, reserved[1])
  table.insert(added, reserved[2])
  return added
end

-- All that is counted of a job's lane, line and tenant, whether or not it adds to it.
function ledger.zero_sums(job)
  local found = {}
  local lane = job.model .. ':' .. job.lane
  for _, name in ipairs({'queued_jobs', 'queued_tokens', 'running_jobs', 'running_tokens',
    'done_tokens'}) do
    table.insert(found, 'counters:' .. lane .. ' ' .. name)
    table.insert(found, 0)
  end
  for _, name in ipairs({'jobs', 'tokens'}) do
    table.insert(found, 'line:' .. lane .. ':' .. job.tenant .. ' ' .. name)
    table.insert(found, 0)
  end
  table.insert(found, 'tenant:' .. job.tenant .. ' reserved')
  table.insert(found, 0)
  return found
end

-- Sets a counter right that held something else.
function ledger.correct(tag, key, field, value, held)
  local kind = string.match(key, '^%a+')
  key = tag .. ':' .. key
  if kind == 'line' and field == 'jobs' and value == 0 then
    redis.call('DEL', key)
    return
  end
  local was_there = redis.call('EXISTS', key) == 1
  redis.call('HSET', key, field, value)
  if kind == 'line' and was_there then
    redis.call('HINCRBY', key, 'left_' .. field, held - value)  -- those behind keep their turns
  elseif kind == 'tenant' and value > 0 then
    redis.call('PERSIST', key)
  elseif kind == 'tenant' then
    redis.call('PEXPIRE', key, TENANT_TTL_MS)
  end
end

-- Counts a queued job as one that runs.
function ledger.start(tag, job)
  local key = tag .. ':counters:' .. job.model .. ':' .. job.lane
  local names = {'queued_jobs', 'queued_tokens', 'running_jobs', 'running_tokens'}
  local counts = redis.call('HMGET', key, unpack(names))
  redis.call('HSET', key, names[1], (counts[1] or 0) - 1, names[2], (counts[2] or 0) - job.cost,
    names[3], (counts[3] or 0) + 1, names[4], (counts[4] or 0) + job.cost)
  ledger.progress(tag, job, ledger.done(job))
  if is_in_tenant_queue(job) then count_in_tenant_queue(tag, job, -1) end
  if recount.includes(tag, job.deadline) then
    recount.add(tag, state_contributions(job, 'queued'), -1)
    recount.add(tag, state_contributions(job, 'running'), 1)
  end
end

-- Counts a job into (1) or out of (-1) what is 'queued' or 'running' in its lane.
function ledger.count(tag, job, what, sign)
  local key = tag .. ':counters:' .. job.model .. ':' .. job.lane
  redis.call('HINCRBY', key, what .. '_jobs', sign)
  redis.call('HINCRBY', key, what .. '_tokens', sign * job.cost)
  if what == 'running' then
    ledger.progress(tag, job, sign * ledger.done(job))
  elseif is_in_tenant_queue(job) then
    count_in_tenant_queue(tag, job, sign)
  end
  if recount.includes(tag, job.deadline) then recount.add(tag, state_contributions(job, what), sign) end
end

-- Notes in its record where a job enters its tenant's line: how much will have left it when its
-- turn comes.
function ledger.note_position(tag, job, record)
  if not is_in_tenant_queue(job) then return end
  local line = redis.call('HMGET', tenant_queue_key(tag, job), 'jobs', 'tokens', 'left_jobs', 'left_tokens')
  for _, word in ipairs({'turn_jobs', (line[1] or 0) + (line[3] or 0),
    'turn_tokens', (line[2] or 0) + (line[4] or 0)}) do
    table.insert(record, word)
  end
end

-- What is known of the lengths of choices, and of how many jobs.
local function lengths(tag, model, lane, tenant)
  local known = redis.call('GET', tag .. ':lengths:' .. model .. ':' .. lane .. ':' .. tenant)
  local estimate, seen = string.match(known or '', '^(%S+) (%d+)$')
  return tonumber(estimate or 0), tonumber(seen or 0)
end

-- The output tokens to expect of a job: what nine outputs in ten of its tenant stay below, or of
-- its lane, for each of its choices; the cap where too few were seen.
function ledger.predicted_output(tag, job, max_tokens, choices)
  for _, tenant in ipairs({job.tenant, ''}) do
    local estimate, seen = lengths(tag, job.model, job.lane, tenant)
    if seen >= MIN_LENGTHS then return math.max(1, math.min(max_tokens, math.ceil(estimate * choices))) end
  end
  return max_tokens
end

-- The estimate goes a fifth of the way up to a longer output and a fiftieth down to a shorter one.
local function learn_length(tag, job, tenant)
  local estimate, seen = lengths(tag, job.model, job.lane, tenant)
  local length = job.tokens / math.max(1, job.choices)
  local gap = length - estimate
  estimate = seen == 0 and length or estimate + gap * (gap > 0 and 0.2 or 0.02)
  redis.call('SET', tag .. ':lengths:' .. job.model .. ':' .. job.lane .. ':' .. tenant,
    string.format('%.17g %d', estimate, seen + 1), 'PX', LENGTHS_TTL_MS)
end

-- Notes how long a job has waited beside how long it was to wait, where that was predicted.
function ledger.calibrate(tag, job, now)
  local predicted = tonumber(job.predicted or -1)
  if predicted < 0 then return end
  local key = tag .. ':calibration:' .. job.model .. ':' .. job.lane
  local known = redis.call('LPUSH', key, string.format('%d %d', predicted, now - job.created))
  if known > MAX_CALIBRATIONS then redis.call('LTRIM', key, 0, MAX_CALIBRATIONS - 1) end
  redis.call('PEXPIRE', key, LENGTHS_TTL_MS)
end

-- Reserves a new job's cost with its tenant.
function ledger.reserve(tag, job)
  local tenant = tag .. ':tenant:' .. job.tenant
  if redis.call('HINCRBY', tenant, 'reserved', job.cost) == job.cost then
    redis.call('PERSIST', tenant)  -- nothing was reserved: it was to expire
  end
  if recount.includes(tag, job.deadline) then recount.add(tag, reservation(job), 1) end
end

-- The bill at a job's end: what it has used is charged, the rest of its cost refunded (more than
-- the cost may be charged: outputs outgrow predictions). A job that no worker took is free.
function ledger.settle(tag, job, status)
  local charge = job.epoch > 0 and job.prompt_tokens + job.tokens or 0
  local refund = job.cost - charge
  redis.call('HSET', job.key, 'charge', charge, 'refund', refund)
  fairness.settle(tag, job, charge)
  local tenant = tag .. ':tenant:' .. job.tenant
  if job.metered == 1 then
    local used = tonumber(redis.call('HGET', tenant, 'tokens') or 0)
    redis.call('HSET', tenant, 'tokens', math.max(0, used - refund))
  end
  if redis.call('HINCRBY', tenant, 'reserved', -job.cost) <= 0 then
    redis.call('PEXPIRE', tenant, TENANT_TTL_MS)
  end
  if recount.includes(tag, job.deadline) then recount.add(tag, reservation(job), -1) end
  if status == 'succeeded' then
    learn_length(tag, job, job.tenant)
    learn_length(tag, job, '')
  end
end

-- Counts a new job's bytes with what is stored of its tenant, and of all (field ''). What is stored
-- of each job, and whose it is, is noted too: its record may expire before it is forgotten.
function ledger.store(tag, job, bytes)
  redis.call('HSET', tag .. ':stored:jobs', job.id, bytes .. ' ' .. job.tenant)
  for _, name in ipairs({job.tenant, ''}) do
    redis.call('HINCRBY', tag .. ':stored:tenants', name, bytes)
  end
end

-- A job is forgotten.
function ledger.unstore(tag, id)
  local stored = redis.call('HGET', tag .. ':stored:jobs', id)
  if not stored then return end
  redis.call('HDEL', tag .. ':stored:jobs', id)
  local bytes, tenant = string.match(stored, '^(%d+) (.+)$')
  if not bytes or #bytes > 15 then return end  -- no function has written this
  for _, name in ipairs({tenant, ''}) do
    if redis.call('HINCRBY', tag .. ':stored:tenants', name, -bytes) <= 0 then
      redis.call('HDEL', tag .. ':stored:tenants', name)
    end
  end
end
