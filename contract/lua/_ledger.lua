-- Accounts for jobs' costs. A job's cost (prompt + predicted output, in tokens) is reserved by submit,
-- grows once the job has drawn more, and is settled by terminal(): cost = charge + refund. The counters
-- of a lane, of a tenant's queue in the lane (key `line:`) and of a tenant always equal the sums over the
-- jobs that they count.
-- requires shared

local LENGTHS_TTL_MS = 7 * 24 * 3600 * 1000
local TENANT_TTL_MS = 24 * 3600 * 1000
local MAX_CALIBRATIONS = 1000
local MIN_LENGTHS = 5  -- outputs after which their lengths predict others
local GROWTH = 32  -- tokens by which a cost grows ahead of what is drawn, so that few steps need the record

-- Whether the job's stream is its tenant's queue: not the lane's returned jobs, not the suspects.
function ledger.is_in_tenant_queue(job)
  return job.stream == tenant_stream(job)
end

function ledger.tenant_queue_key(tag, job)
  return tag .. ':line:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant
end

local function counters_key(tag, job)
  return tag .. ':counters:' .. job.model .. ':' .. job.lane
end

-- Computed tokens of a running job's cost: the prompt, once there is output, and the output.
function ledger.done(job)
  if job.tokens == 0 then return 0 end
  return math.min(job.cost, job.prompt_tokens + job.tokens)
end

-- Adds computed tokens to the counters of a lane's running jobs.
function ledger.progress(tag, job, tokens)
  if tokens == 0 then return end
  redis.call('HINCRBY', counters_key(tag, job), 'done_tokens', tokens)
end

-- Adds a job to (1) or removes it from (-1) its tenant's queue. Returns the jobs and tokens that will
-- have left it before a job that comes now; those that are early are counted when it is asked.
local function count_in_tenant_queue(tag, job, sign)
  local key, gains = ledger.tenant_queue_key(tag, job), {'jobs', sign, 'tokens', sign * job.cost,
    'left_jobs', 0, 'left_tokens', 0}
  if sign < 0 and not queue.leave(tag, job) then gains[6], gains[8] = 1, job.cost end
  local jobs, tokens, left_jobs, left_tokens = unpack(add_to(key, gains))
  local before = sign > 0 and queue.arrive(tag, job, jobs - 1) or 0
  if jobs == 0 then
    redis.call('DEL', key)
    fairness.deactivate(tag, job.model, job.lane, job.tenant)
  elseif jobs == 1 and sign > 0 then
    fairness.activate(tag, job.model, job.lane, job.tenant)
  end
  return before + left_jobs,
    math.floor((tokens - job.cost) * before / math.max(1, jobs - 1)) + left_tokens
end

-- Whether a flow's job called this one, and has reserved its tokens.
function ledger.is_call(job)
  return job.part == 'child' or job.part == 'nested'
end

-- Lets the record of a tenant without reservations expire.
function ledger.expire_tenant(key)
  redis.call('PEXPIRE', key, TENANT_TTL_MS)
end

-- What an unfinished job reserves of its tenant's tokens.
function ledger.reserved(job)
  return ledger.is_call(job) and (job.grown or 0) or job.cost
end

-- Moves a job from the queued counters to the running ones.
function ledger.start(tag, job)
  add_to(counters_key(tag, job), {'queued_jobs', -1, 'queued_tokens', 0 - job.cost,
    'running_jobs', 1, 'running_tokens', job.cost, 'done_tokens', ledger.done(job)})
  if ledger.is_in_tenant_queue(job) then count_in_tenant_queue(tag, job, -1) end
end

-- Adds a job to (1) or removes it from (-1) the running counters.
function ledger.count_running(tag, job, sign)
  add_to(counters_key(tag, job), {'running_jobs', sign, 'running_tokens', sign * job.cost,
    'done_tokens', sign * ledger.done(job)})
end

-- Adds a job to (1) or removes it from (-1) the counters of those that wait. Returns, where the job waits in its
-- tenant's queue, the jobs and tokens that will have left it before.
function ledger.count_queued(tag, job, sign)
  if job.stream == later.stream(job) then return later.count(tag, job, sign) end
  add_to(counters_key(tag, job), {'queued_jobs', sign, 'queued_tokens', sign * job.cost})
  if ledger.is_in_tenant_queue(job) then return count_in_tenant_queue(tag, job, sign) end
end

-- The estimated output length of a choice, and the number of jobs behind the estimate.
local function lengths(tag, model, lane, tenant)
  local known = redis.call('GET', tag .. ':lengths:' .. model .. ':' .. lane .. ':' .. tenant)
  local estimate, seen = string.match(known or '', '^(%S+) (%d+)$')
  return tonumber(estimate or 0), tonumber(seen or 0)
end

-- Predicted output tokens of a job: 0 where max_tokens is 0; the 90th percentile of the tenant's outputs
-- in the lane, or of all tenants' there, times the number of choices; where fewer than MIN_LENGTHS were
-- seen, the cap. Limits rest on it, so what the caller expects can only raise it. And which of them it
-- is: none, learned or cap.
function ledger.predicted_output(tag, job, terms)
  local max_tokens, choices, expected = terms.max_tokens, terms.choices, terms.expected_tokens or 0
  if max_tokens == 0 then return 0, 'none' end
  for _, tenant in ipairs({job.tenant, ''}) do
    local estimate, seen = lengths(tag, job.model, job.lane, tenant)
    if seen >= MIN_LENGTHS then
      local learned = math.max(1, math.ceil(estimate * choices), expected)
      return math.min(max_tokens, learned), 'learned'
    end
  end
  return max_tokens, 'cap'
end

-- Moves the estimate up by a fifth of the gap to a longer output, down by a fiftieth to a shorter. A
-- caller can make any output short. So one that was cut, by its cap or before its end, lowers nothing;
-- where stop strings or the like may have ended it (`steered`), the first estimate is the cap, and it
-- falls by a five hundredth.
local function learn_length(tag, job, tenant, is_whole)
  local estimate, seen = lengths(tag, job.model, job.lane, tenant)
  local choices, steered = math.max(1, job.choices), job.steered == '1'
  local length = job.tokens / choices
  local gap = length - estimate
  if not is_whole and (gap <= 0 or seen == 0) then return end
  if seen == 0 then
    estimate = steered and job.max_tokens / choices or length
  else
    estimate = estimate + gap * (gap > 0 and 0.2 or steered and 0.002 or 0.02)
  end
  redis.call('SET', tag .. ':lengths:' .. job.model .. ':' .. job.lane .. ':' .. tenant,
    string.format('%.17g %d', estimate, seen + 1), 'PX', LENGTHS_TTL_MS)
end

-- Records a job's predicted and actual wait, where a wait was predicted.
function ledger.calibrate(tag, job, now)
  local predicted = tonumber(job.predicted or -1)
  if predicted < 0 then return end
  local key = tag .. ':calibration:' .. job.model .. ':' .. job.lane
  local known = redis.call('LPUSH', key, string.format('%d %d', predicted, now - job.created))
  if known > MAX_CALIBRATIONS then redis.call('LTRIM', key, 0, MAX_CALIBRATIONS - 1) end
  redis.call('PEXPIRE', key, LENGTHS_TTL_MS)
end

-- Reserves tokens with the job's tenant: by default those of a new job.
function ledger.reserve(tag, job, tokens)
  local tenant = tag .. ':tenant:' .. job.tenant
  tokens = tokens or ledger.reserved(job)
  if redis.call('HINCRBY', tenant, 'reserved', tokens) == tokens and tokens > 0 then
    redis.call('PERSIST', tenant)  -- without reservations the key expires
  end
end

-- A price of a record, from 0 to 1; where the text is no such price, 1.
local function readable_price(text)
  local price = tonumber(text or 1)
  return price and price >= 0 and price <= 1 and price or 1
end

-- What a token of a job counts in its tenant's meter of tokens: in the lane `batch` its submission's
-- `batch_price`, elsewhere 1.
function ledger.price(lane, text)
  return lane == 'batch' and readable_price(text) or 1
end

-- Lets the cost of a running job grow where it has drawn more, up to its cap, and with it what its tenant
-- reserves and has in its meter. A flow's job computes nothing: its calls grow.
function ledger.grow(tag, job, now)
  local excess = job.prompt_tokens + job.tokens - job.cost
  if excess <= 0 or is_flow(job) then return end
  local more = math.min(excess + GROWTH, job.prompt_tokens + job.max_tokens - job.cost)
  job.cost, job.grown = job.cost + more, job.grown + more
  redis.call('HSET', job.key, 'cost', job.cost, 'grown', job.grown)
  add_to(counters_key(tag, job), {'running_tokens', more})
  ledger.reserve(tag, job, more)
  ledger.hold(tag, job, nil, job.token_bytes * more)
  if job.metered > 0 then
    admission.meter(tag, job, more * ledger.price(job.lane, job.batch_price), now)
  end
end

-- Settles a job's cost at its end: charges the tokens used and refunds the rest. A job that no worker
-- claimed costs nothing.
-- In the tenant's meter the used tokens replace the reserved ones, those of the prompt that were cached at
-- the submission's `cached_price`. Calls of a flow add theirs, and the flow's job nothing, so that the meter
-- is right however the flow ends.
function ledger.settle(tag, job, status, now)
  local charge = job.epoch > 0 and job.prompt_tokens + job.tokens or 0
  fairness.settle(tag, job, charge)
  if job.metered > 0 then
    local used = is_flow(job) and 0 or charge - job.cached * (1 - readable_price(job.cached_price))
    local price = ledger.price(job.lane, job.batch_price)
    admission.meter(tag, job, (used - ledger.reserved(job)) * price, now)
  end
  local tenant = tag .. ':tenant:' .. job.tenant
  -- 0 - 0 is 0, -0 is not: Redis 7.0 refuses it.
  if redis.call('HINCRBY', tenant, 'reserved', 0 - ledger.reserved(job)) <= 0 then
    ledger.expire_tenant(tenant)
  end
  local is_whole = status == 'succeeded' and job.tokens < job.max_tokens
  learn_length(tag, job, job.tenant, is_whole)
  learn_length(tag, job, '', is_whole)
  return charge
end

-- What is noted of a job's bytes until it is forgotten, because its record may expire before: those
-- stored in all, those in Redis, its lane and its tenant. nil where nothing is noted.
local function noted_bytes(tag, id)
  local noted = redis.call('HGET', tag .. ':stored:jobs', id) or ''
  local stored, bytes, lane, tenant = string.match(noted, '^(%d+) (%d+) (%S+) (%S+)$')
  if not stored or #stored > 15 or #bytes > 15 then return nil end
  return {stored = stored, bytes = tonumber(bytes), lane = lane, tenant = tenant}
end

local function note_bytes(tag, id, stored, bytes, lane, tenant)
  redis.call('HSET', tag .. ':stored:jobs', id, string.format('%s %d %s %s', stored, bytes, lane, tenant))
end

-- Adds a new job's bytes to those of its tenant and of all tenants (field ''), and its bytes in Redis to
-- those of its lane.
function ledger.store(tag, job, stored)
  note_bytes(tag, job.id, stored, job.bytes, job.lane, job.tenant)
  for _, name in ipairs({job.tenant, ''}) do
    redis.call('HINCRBY', tag .. ':stored:tenants', name, stored)
  end
  memory.add(tag, job.lane, job.tenant, job.bytes)
end

-- A job takes other bytes in Redis, `more` than noted, or those in another lane (job.lane).
function ledger.hold(tag, job, bytes, more)
  local noted = noted_bytes(tag, job.id)
  if not noted then return end
  bytes = bytes or noted.bytes + (more or 0)
  if job.lane == noted.lane then
    memory.add(tag, job.lane, noted.tenant, bytes - noted.bytes)
  else
    memory.add(tag, noted.lane, noted.tenant, 0 - noted.bytes)
    memory.add(tag, job.lane, noted.tenant, bytes)
  end
  note_bytes(tag, job.id, noted.stored, bytes, job.lane, noted.tenant)
end

-- Subtracts a forgotten job's bytes.
function ledger.unstore(tag, id)
  local noted = noted_bytes(tag, id)
  redis.call('HDEL', tag .. ':stored:jobs', id)
  if not noted then return end
  for _, name in ipairs({noted.tenant, ''}) do
    if redis.call('HINCRBY', tag .. ':stored:tenants', name, '-' .. noted.stored) <= 0 then
      redis.call('HDEL', tag .. ':stored:tenants', name)
    end
  end
  memory.add(tag, noted.lane, noted.tenant, 0 - noted.bytes)
  redis.call('ZREM', tag .. ':stored:passing:' .. noted.lane, id)
end
