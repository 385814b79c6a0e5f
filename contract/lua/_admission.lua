-- Decides whether to accept a job and predicts when it would start. Writes nothing.
-- requires shared, later, pauses, pools, promises

local LOAD = {'queued_jobs', 'queued_tokens', 'running_jobs', 'running_tokens', 'done_tokens'}
local METERS = {requests_per_min = true, tokens_per_min = true}  -- exact: no promise is needed
local UNMEASURED_MS = 10000  -- two heartbeats, by which busy workers have measured their rate

-- Takes what is paused off the waiting jobs of a lane.
local function leave_out_paused(tag, model, lane, load, paused)
  if pauses.hold(paused, lane, '') then
    load.queued_jobs, load.queued_tokens = 0, 0
    return
  end
  for tenant in pairs(pauses.tenants_in(paused, lane)) do
    local line = numbers(tag .. ':line:' .. model .. ':' .. lane .. ':' .. tenant, {'jobs', 'tokens'})
    load.queued_jobs = math.max(0, load.queued_jobs - line.jobs)
    load.queued_tokens = math.max(0, load.queued_tokens - line.tokens)
  end
end

-- Estimates the work ahead of a job with `own_jobs` and `own_tokens` of its tenant ahead of it.
-- Fair sharing serves other tenants of the lane in proportion to their weights; all that waits in
-- more urgent lanes comes first, but for what is paused. `itself` is 1 where the counters include the
-- job.
function admission.ahead(tag, job, pool, own_jobs, own_tokens, itself)
  local lane = numbers(tag .. ':counters:' .. job.model .. ':' .. job.lane, LOAD)
  local paused = pauses.find(tag, job.model)
  local others = fairness.weight_of_others(tag, job.model, job.lane, job.tenant, paused)
  local times = (others + job.weight) / job.weight
  local own = math.max(0, math.min(math.floor(own_tokens * times),
    lane.queued_tokens - itself * job.cost))
  local ahead = {
    jobs = math.max(0, math.min(math.floor(own_jobs * times), lane.queued_jobs - itself)),
    tokens = own, own_tokens = own,
    lane_jobs = lane.queued_jobs, lane_tokens = lane.queued_tokens,
    lane_running_tokens = lane.running_tokens,
    other_weight = others, paused = paused,
    running_jobs = 0, remaining_tokens = 0, running_tokens = 0, young_tokens = 0,
    own_young_tokens = lane.running_tokens - 2 * lane.done_tokens,
  }
  local used, kept = 0, 0
  local is_before = string.find(' ' .. pool.lanes .. ' ', ' ' .. job.lane .. ' ', 1, true) ~= nil
  local names = is_before and pool.lanes or job.lane
  for name in string.gmatch(names, '%S+') do
    local load = name == job.lane and lane
      or numbers(tag .. ':counters:' .. job.model .. ':' .. name, LOAD)
    is_before = is_before and name ~= job.lane
    if name ~= job.lane and paused then leave_out_paused(tag, job.model, name, load, paused) end
    if is_before then
      ahead.jobs = ahead.jobs + load.queued_jobs
      ahead.tokens = ahead.tokens + load.queued_tokens
      used = used + pool.used[name]
    elseif name ~= job.lane and load.queued_jobs > 0 then
      kept = kept + pool.shares[name]
    end
    if is_before or name == job.lane then
      ahead.young_tokens = ahead.young_tokens + load.running_tokens - 2 * load.done_tokens
    end
    ahead.running_jobs = ahead.running_jobs + load.running_jobs
    ahead.running_tokens = ahead.running_tokens + load.running_tokens
    ahead.remaining_tokens = ahead.remaining_tokens + load.running_tokens - load.done_tokens
  end
  ahead.rates = pools.available_rates(pool, job.lane, used, kept)
  return ahead
end

-- ms until a job starts; UNKNOWN without a measured rate. 0 where the workers have room. Otherwise
-- the work ahead must be claimed and one running job must end, at the rate that is left for the lane
-- or at the lane's minimum share, whichever is sooner.
-- Running jobs that started together end together: while less than half of their tokens is computed,
-- the wait is at least the time for twice the tokens missing to that half (`young_tokens`). Jobs of
-- less urgent lanes do not count, because they give way.
function admission.wait_ms(pool, ahead, cost, cold_ms)
  local has_room = ahead.jobs + ahead.running_jobs == 0 or (
    ahead.jobs + ahead.running_jobs < pool.max_jobs * pool.live
    and ahead.tokens + ahead.running_tokens + cost <= pool.max_tokens * pool.live)
  if pool.live > 0 and has_room then return 0 end
  if pool.live == 0 and ahead.jobs + ahead.running_jobs == 0 then return cold_ms end
  local rest = ahead.running_jobs > 0 and ahead.remaining_tokens / ahead.running_jobs or 0
  if pool.rate == 0 then return UNKNOWN end
  local wait = math.max(pools.drain_ms(ahead.rates.left, ahead.tokens + rest),
    pools.drain_ms(pool.rate, ahead.young_tokens))
  if ahead.rates.own > 0 then
    wait = math.min(wait, math.max(pools.drain_ms(ahead.rates.own, ahead.own_tokens + rest),
      pools.drain_ms(pool.rate, ahead.own_young_tokens)))
  end
  return wait + (pool.live == 0 and cold_ms or 0)
end

-- Whether a job of the tenant starts without waiting for other jobs to end: nothing is ahead of it,
-- and the tenant's unfinished tokens with this job are at most its share, by weight among the waiting
-- tenants, of the tokens that run in the lane.
function admission.is_below_share(pool, job, ahead, reserved)
  return pool.live > 0 and ahead.jobs == 0 and ahead.other_weight > 0
    and reserved * (ahead.other_weight + job.weight) <= ahead.lane_running_tokens * job.weight
end

-- The level of a leaky bucket that drains `limit` per minute.
local function level(used, at, limit, now)
  if limit == 0 then return 0 end
  return math.max(0, used - math.max(0, now - at) * limit / 60000)
end

-- ms until an amount fits into the bucket; UNKNOWN where it exceeds the limit.
local function meter_ms(level_now, amount, limit)
  if amount > limit then return UNKNOWN end
  return math.ceil((level_now + amount - limit) * 60000 / limit)
end

-- Charges the tenant's meter of tokens with the difference where a job's new lane has another price.
function admission.reprice(tag, job, lane, now)
  if job.metered == 0 then return end
  local more = ledger.price(lane, job.batch_price) - ledger.price(job.lane, job.batch_price)
  admission.meter(tag, job, ledger.reserved(job) * more, now)
end

-- Adds to the tenant's meter of tokens.
function admission.meter(tag, job, more, now)
  if more == 0 then return end
  local key = tag .. ':tenant:' .. job.tenant
  local found = numbers(key, {'tokens', 'tokens_ms'})
  local used = level(found.tokens, found.tokens_ms, job.metered, now)
  redis.call('HSET', key, 'tokens', math.max(0, used + more), 'tokens_ms', now)
end

-- The tenant's rate levels and reserved tokens, its stored bytes and those of all tenants.
function admission.tenant(tag, tenant, terms, now)
  local found = numbers(tag .. ':tenant:' .. tenant,
    {'requests', 'requests_ms', 'tokens', 'tokens_ms', 'reserved'})
  local stored = redis.call('HMGET', tag .. ':stored:tenants', tenant, '')
  return {
    stored = whole_number(stored[1] or 0) or 0, all_stored = whole_number(stored[2] or 0) or 0,
    requests = level(found.requests, found.requests_ms, terms.requests_per_min, now),
    tokens = level(found.tokens, found.tokens_ms, terms.tokens_per_min, now),
    reserved = found.reserved,
  }
end

-- {requests left, ms until full, tokens left, ms until full} of the tenant's limits per minute; zeros
-- where there is no limit.
function admission.rates(tenant, terms)
  local rates = {}
  for _, what in ipairs({'requests', 'tokens'}) do
    local limit = terms[what .. '_per_min']
    table.insert(rates, math.max(0, math.floor(limit - tenant[what])))
    table.insert(rates, limit == 0 and 0 or math.ceil(tenant[what] * 60000 / limit))
  end
  return rates
end

-- ms until one more request fits into the tenant's meter; 0 where it does.
function admission.requests_ms(tenant, terms)
  local limit = terms.requests_per_min
  return limit > 0 and tenant.requests + 1 > limit and meter_ms(tenant.requests, 1, limit) or 0
end

-- Adds to the tenant's meter of requests. `tenant`: its levels, which this keeps.
function admission.count_request(tag, name, tenant, more, terms, now)
  if terms.requests_per_min == 0 then return end
  tenant.requests = math.max(0, tenant.requests + more)
  local key = tag .. ':tenant:' .. name
  redis.call('HSET', key, 'requests', tenant.requests, 'requests_ms', now)
  redis.call('HSETNX', key, 'reserved', 0)
  if tenant.reserved <= 0 then ledger.expire_tenant(key) end
end

-- Charges the tenant's meters for a job that is accepted. `tenant`: its levels, which this keeps.
function admission.charge(tag, job, tenant, terms, now)
  local changed = {}
  if terms.requests_per_min > 0 then
    tenant.requests = tenant.requests + 1
    changed = {'requests', tenant.requests, 'requests_ms', now}
  end
  if terms.tokens_per_min > 0 then
    tenant.tokens = tenant.tokens + ledger.reserved(job) * job.price
    for _, word in ipairs({'tokens', tenant.tokens, 'tokens_ms', now}) do table.insert(changed, word) end
  end
  if #changed > 0 then redis.call('HSET', tag .. ':tenant:' .. job.tenant, unpack(changed)) end
end

-- ms until a job's tokens fit under a limit beside others; UNKNOWN where they never do.
local function fit_ms(rate, others, cost, limit)
  if cost > limit then return UNKNOWN end
  return rate == 0 and UNMEASURED_MS or pools.drain_ms(rate, others + cost - limit)
end

local function tenant_refusal(pool, lane_rate, tenant, line_tokens, job, terms)
  if ledger.is_call(job) then return end  -- the flow was admitted with its calls
  local cost, metered = job.cost, job.cost * job.price
  if terms.max_tenant_bytes > 0 and tenant.stored + terms.stored_bytes > terms.max_tenant_bytes then
    return 'stored_bytes', UNKNOWN
  end
  if admission.requests_ms(tenant, terms) > 0 then
    return 'requests_per_min', admission.requests_ms(tenant, terms)
  end
  if terms.tokens_per_min > 0 and tenant.tokens + metered > terms.tokens_per_min then
    return 'tokens_per_min', meter_ms(tenant.tokens, metered, terms.tokens_per_min)
  end
  local concurrent = terms.concurrent_tokens
  if concurrent > 0 and tenant.reserved + cost > concurrent then
    return 'concurrent_tokens', fit_ms(pool.rate, tenant.reserved, cost, concurrent)
  end
  local share = terms.lane_share * terms.lane_tokens
  if share > 0 and line_tokens + cost > share then
    return 'lane_share', fit_ms(lane_rate, line_tokens, cost, share)
  end
end

-- ms by which a job's wait exceeds the lane's bound; nil where it does not. The cold start does not
-- count, because otherwise a pool without workers would never start. Before a rate is measured, the
-- bound is as much work as the workers hold at once.
local function excess_wait_ms(pool, ahead, wait, terms)
  if terms.lane_wait_ms == 0 then return nil end
  if wait ~= UNKNOWN then
    local over = wait - (pool.live == 0 and terms.cold_ms or 0) - terms.lane_wait_ms
    return over > 0 and over or nil
  end
  local workers = math.max(1, pool.live)
  local is_full = pool.max_jobs > 0 and (ahead.jobs >= pool.max_jobs * workers
    or ahead.tokens > pool.max_tokens * workers)
  return is_full and UNMEASURED_MS or nil
end

local function lane_refusal(pool, lane_rate, ahead, wait, cost, terms)
  local bound = terms.lane_tokens
  if bound > 0 and ahead.lane_tokens + cost > bound then
    return 'lane_tokens', fit_ms(lane_rate, ahead.lane_tokens, cost, bound)
  end
  local over_ms = excess_wait_ms(pool, ahead, wait, terms)
  if over_ms then return 'lane_wait', over_ms end
end

local function serves_lane(pool, lane)
  return pool.lanes == '' or string.find(' ' .. pool.lanes .. ' ', ' ' .. lane .. ' ', 1, true)
end

-- Evaluates a job (tenant, model, lane) and sets its cost, price and weight. Returns the tenant's
-- levels, the work ahead, wait and service time in ms, and where the job is refused {reason, limit, ms
-- until a retry may succeed} and in `promised` the earliest retry time of the next job of its tenant
-- queue. `room`: bytes that all jobs may take (_memory.lua).
function admission.evaluate(tag, job, terms, now, room)
  local pool = pools.find(tag, job.model, now)
  local output, basis = ledger.predicted_output(tag, job, terms)
  job.cost = terms.prompt_tokens + (terms.call_prompt_tokens or 0) + output
  job.price = ledger.price(job.lane, terms.batch_price)
  job.weight = fairness.readable_weight(terms.weight)
  memory.measure(job, terms, output, basis)
  local line = numbers(tag .. ':line:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant,
    {'jobs', 'tokens', 'latest'})
  local tenant = admission.tenant(tag, job.tenant, terms, now)
  local num_others, num_early = queue.count_before(tag, tenant_stream(job), terms.priority or 0,
    now + terms.deadline_ms, line.latest, line.jobs)
  local before = num_others + num_early
  local ahead = admission.ahead(tag, job, pool, before,
    math.floor(line.tokens * before / math.max(1, line.jobs)), 0)
  local wait = admission.wait_ms(pool, ahead, job.cost, terms.cold_ms)
  if admission.is_below_share(pool, job, ahead, tenant.reserved + job.cost) then wait = 0 end
  local is_later = (terms.start_ms or 0) > now
  if is_later then  -- what waits now says nothing of that time
    wait, ahead.jobs, ahead.tokens = 0, 0, 0
    line.tokens, ahead.lane_tokens = later.tokens(tag, job)
  end
  -- What the caller expects serves to tell the time: it may refuse this job alone.
  local told = terms.max_tokens == 0 or (terms.expected_tokens or 0) > 0
  local service = pools.service_ms(pool, told and math.min(terms.expected_tokens or 0, terms.max_tokens)
    or output, terms.choices)
  local lane_rate = math.max(ahead.rates.left, ahead.rates.own)
  local found = {tenant = tenant, ahead = ahead, wait = wait, service = service}
  local function refused(reason, limit, retry_ms)
    local gap_ms = pools.drain_ms(pool.rate, UNPROMISED_RATIO * job.cost)
    if retry_ms ~= UNKNOWN and gap_ms ~= UNKNOWN and not METERS[limit] then
      local at
      at, found.promised = promises.next(tag, job, gap_ms, retry_ms, now)
      retry_ms = at - now
    end
    found.refusal = {reason, limit, retry_ms}
    return found
  end
  if not serves_lane(pool, job.lane) then return refused('unknown_lane', pool.lanes, UNKNOWN) end
  if not ledger.is_call(job) and not is_later and pauses.hold(ahead.paused, job.lane, job.tenant) then
    found.refusal = {'lane_paused', '', PAUSED_RETRY_MS}
    return found
  end
  if pool.live == 0 and terms.needs_worker then
    found.refusal = {'no_workers', '', pools.start_ms(pool, now)}  -- no promise: it may have room for all
    return found
  end
  if terms.max_bytes > 0 and tenant.all_stored + terms.stored_bytes > terms.max_bytes then
    return refused('storage_full', '', UNKNOWN)
  end
  local limit, retry_ms = tenant_refusal(pool, lane_rate, tenant, line.tokens, job, terms)
  if limit then return refused('tenant_quota', limit, retry_ms) end
  if not ledger.is_call(job) then
    local is_alone
    limit, is_alone = memory.refusal(tag, job, room)
    retry_ms = is_alone and UNKNOWN or UNMEASURED_MS
    if limit == 'tenant_memory' then return refused('tenant_quota', limit, retry_ms) end
    if limit then return refused('lane_full', limit, retry_ms) end
  end
  limit, retry_ms = lane_refusal(pool, lane_rate, ahead, wait, job.cost, terms)
  if limit then return refused('lane_full', limit, retry_ms) end
  -- A cap does not tell the length. Earlier outputs do, but where nothing is ahead the job may show
  -- that it is shorter, or that the worker is faster: otherwise neither would ever be learned.
  local is_known = told or basis == 'learned' and wait > 0
  local run = is_known and service or 0
  local late_ms = wait + run - terms.deadline_ms
  if wait ~= UNKNOWN and late_ms > 0 then
    return refused('deadline_infeasible', '', run > terms.deadline_ms and UNKNOWN or late_ms)
  end
  if is_later then found.wait = UNKNOWN end
  return found
end
