-- Fair sharing of a lane among tenants. Each tenant has a counter of claimed tokens divided by its
-- weight, in the sorted set `active` while it has waiting jobs and in `idle` afterwards. The tenant with
-- the lowest counter is served first. The lane's clock is the counter of the tenant served last. A
-- returning tenant starts at the higher of its own counter and the clock, so it neither saves credit
-- nor loses debt. The hash `weights` holds each tenant's weight from its latest job.
-- requires shared

local MIN_WEIGHT, MAX_WEIGHT = 0.01, 100
local MAX_WEIGHED = 256  -- tenants of a lane whose weights are read; others count as 1

local function lane_clock(tag, model, lane)
  return tonumber(redis.call('GET', lane_key(tag, 'clock', model, lane)) or 0)
end

-- A tenant's weight as a number; 1 where the text is not a valid weight.
function fairness.readable_weight(text)
  local weight = tonumber(text or 1)
  return weight and weight >= MIN_WEIGHT and weight <= MAX_WEIGHT and weight or 1
end

function fairness.weight(tag, tenant)
  return fairness.readable_weight(redis.call('HGET', tag .. ':weights', tenant))
end

-- The weights by tenant: few are read at once, as a short hash is searched from its beginning; of many each
-- when it is needed.
function fairness.weights(tag)
  local key, known = tag .. ':weights', {}
  local is_short = redis.call('HLEN', key) <= 2 * MAX_WEIGHED
  local flat = is_short and redis.call('HGETALL', key) or {}
  for i = 1, #flat, 2 do known[flat[i]] = fairness.readable_weight(flat[i + 1]) end
  return setmetatable(known, {__index = function(_, tenant)
    known[tenant] = is_short and 1 or fairness.weight(tag, tenant)
    return known[tenant]
  end})
end

-- Stores the tenant's weight; 1 is not stored.
function fairness.set_weight(tag, tenant, weight)
  if weight == fairness.weight(tag, tenant) then return end
  if weight == 1 then
    redis.call('HDEL', tag .. ':weights', tenant)
  else
    redis.call('HSET', tag .. ':weights', tenant, weight)
  end
end

-- The sum of the weights of all other tenants with waiting jobs in the lane, but paused ones.
function fairness.weight_of_others(tag, model, lane, tenant, paused)
  local active = lane_key(tag, 'active', model, lane)
  if not paused and redis.call('EXISTS', tag .. ':weights') == 0 then
    return redis.call('ZCARD', active) - (redis.call('ZSCORE', active, tenant) and 1 or 0)
  end
  local names = redis.call('ZRANGE', active, 0, MAX_WEIGHED - 1)
  if #names == 0 then return 0 end
  local sum = #names < MAX_WEIGHED and 0 or redis.call('ZCARD', active) - MAX_WEIGHED
  local weights = fairness.weights(tag)
  for _, name in ipairs(names) do
    if name ~= tenant and not pauses.hold(paused, lane, name) then sum = sum + weights[name] end
  end
  return sum
end

-- Called when the tenant's first job in the lane starts to wait.
function fairness.activate(tag, model, lane, tenant)
  local idle = lane_key(tag, 'idle', model, lane)
  local own = tonumber(redis.call('ZSCORE', idle, tenant) or 0)
  redis.call('ZREM', idle, tenant)
  redis.call('ZADD', lane_key(tag, 'active', model, lane), math.max(own, lane_clock(tag, model, lane)),
    tenant)
end

-- Moves the counters of tenants whose waiting jobs are paused, a set, on to the clock: they save no credit.
function fairness.keep_up(tag, model, lane, tenants)
  local active, now = lane_key(tag, 'active', model, lane), redis.call('GET', lane_key(tag, 'clock', model, lane))
  for _, tenant in ipairs(now and redis.call('ZRANGE', active, '-inf', '(' .. now, 'BYSCORE') or {}) do
    if tenants[tenant] then redis.call('ZADD', active, now, tenant) end
  end
end

-- Called when the tenant has no waiting job in the lane; a counter above the clock is kept.
function fairness.deactivate(tag, model, lane, tenant)
  local active = lane_key(tag, 'active', model, lane)
  local own = tonumber(redis.call('ZSCORE', active, tenant) or 0)
  redis.call('ZREM', active, tenant)
  local idle, now = lane_key(tag, 'idle', model, lane), lane_clock(tag, model, lane)
  if own > now then redis.call('ZADD', idle, own, tenant) end
  redis.call('ZREMRANGEBYSCORE', idle, '-inf', now)
end

-- Adds tokens to the tenant's counter; a negative number refunds.
function fairness.add_tokens(tag, model, lane, tenant, tokens)
  if tokens == 0 then return end
  tokens = tokens / fairness.weight(tag, tenant)
  local active = lane_key(tag, 'active', model, lane)
  if redis.call('ZSCORE', active, tenant) then
    redis.call('ZINCRBY', active, tokens, tenant)
    return
  end
  local idle, now = lane_key(tag, 'idle', model, lane), lane_clock(tag, model, lane)
  local own = math.max(now, tonumber(redis.call('ZSCORE', idle, tenant) or 0)) + tokens
  if own > now then redis.call('ZADD', idle, own, tenant) else redis.call('ZREM', idle, tenant) end
end

-- Charges a job claimed from its tenant queue. The caller must store `job.charged` in the record.
function fairness.charge(tag, job)
  local active = lane_key(tag, 'active', job.model, job.lane)
  local own = tonumber(redis.call('ZSCORE', active, job.tenant))
  if own > lane_clock(tag, job.model, job.lane) then
    redis.call('SET', lane_key(tag, 'clock', job.model, job.lane), string.format('%.17g', own))
  end
  redis.call('ZINCRBY', active, job.cost / fairness.weight(tag, job.tenant), job.tenant)
  job.charged = job.cost
end

-- Replaces what the job was charged when claimed by its final charge.
function fairness.settle(tag, job, charge)
  if job.charged > 0 then
    fairness.add_tokens(tag, job.model, job.lane, job.tenant, charge - job.charged)
  end
end

-- Moves a charged job to another lane; `keeps` moves its charge too, otherwise the charge is refunded.
function fairness.move(tag, job, lane, keeps)
  if job.charged == 0 then return end
  fairness.add_tokens(tag, job.model, job.lane, job.tenant, 0 - job.charged)
  if keeps then
    fairness.add_tokens(tag, job.model, lane, job.tenant, job.charged)
  else
    job.charged = 0
    redis.call('HSET', job.key, 'charged', 0)
  end
end

-- A lane's slots and tokens at a worker, and each tenant's part of them. From the fifth word of a
-- claim's lane argument on: slots, tokens, then tenant, slots, tokens for each tenant.
function fairness.parse_slots(tag, words, weights)
  local fair = {slots = tonumber(words[5]), tokens = tonumber(words[6]), weight = 0, held = {}, weights = weights}
  for i = 7, #words, 3 do
    fairness.add_held(tag, fair, words[i], tonumber(words[i + 1]), tonumber(words[i + 2]))
  end
  return fair
end

-- The tokens of the largest job that the tenant may claim within its share by weight among the tenants
-- that hold slots and itself. 0 or less where one more slot exceeds that share.
function fairness.tenant_room(tag, fair, tenant)
  local held = fair.held[tenant]
  local slots, tokens, weight = 0, 0, fair.weights[tenant]
  local sum = fair.weight
  if held then slots, tokens = held.slots, held.tokens else sum = sum + weight end
  if slots + 1 > math.floor(fair.slots * weight / sum) then return 0 end
  return math.floor(fair.tokens * weight / sum) - tokens
end

-- Adds a claimed job to what the tenant holds of the lane.
function fairness.add_held(tag, fair, tenant, choices, cost)
  local held = fair.held[tenant]
  if not held then
    held = {slots = 0, tokens = 0}
    fair.held[tenant] = held
    fair.weight = fair.weight + fair.weights[tenant]
  end
  held.slots, held.tokens = held.slots + choices, held.tokens + cost
end
