-- Who goes next among the tenants of a lane: each has a counter of the tokens it was handed out,
-- divided by its weight (`active` while it has a line, `idle` after), and the least goes first. The
-- lane's clock is the counter of the last that went: who comes back starts there at least, so that no
-- credit is saved up, and where it was at least, so that no debt is forgotten by an empty line.
-- `weights` has the tenants' weights, as their latest jobs said them.

local fairness = {}

local MIN_WEIGHT, MAX_WEIGHT = 0.01, 100
local MAX_WEIGHED = 256  -- tenants of a lane whose weights are read; others count as 1

local function lane_key(tag, kind, model, lane)
  return tag .. ':' .. kind .. ':' .. model .. ':' .. lane
end

local function lane_clock(tag, model, lane)
  return tonumber(redis.call('GET', lane_key(tag, 'clock', model, lane)) or 0)
end

-- What was said to be a tenant's weight, as a number; 1 where it is none.
local function readable_weight(text)
  local weight = tonumber(text or 1)
  return weight and weight >= MIN_WEIGHT and weight <= MAX_WEIGHT and weight or 1
end

function fairness.weight(tag, tenant)
  return readable_weight(redis.call('HGET', tag .. ':weights', tenant))
end

-- The tenant has this weight from now on. Only weights other than 1 are stored.
function fairness.set_weight(tag, tenant, weight)
  if weight == fairness.weight(tag, tenant) then return end
  if weight == 1 then
    redis.call('HDEL', tag .. ':weights', tenant)
  else
    redis.call('HSET', tag .. ':weights', tenant, weight)
  end
end

-- The weights of all tenants but this one that wait in a lane, added up.
function fairness.weight_of_others(tag, model, lane, tenant)
  local active = lane_key(tag, 'active', model, lane)
  local names = redis.call('ZRANGE', active, 0, MAX_WEIGHED - 1)
  if #names == 0 then return 0 end
  local sum = redis.call('ZCARD', active) - #names
  local weights = redis.call('HMGET', tag .. ':weights', unpack(names))
  for i, name in ipairs(names) do
    if name ~= tenant then sum = sum + readable_weight(weights[i]) end
  end
  return sum
end

-- The tenant has a line from now on.
function fairness.activate(tag, model, lane, tenant)
  local idle = lane_key(tag, 'idle', model, lane)
  local own = tonumber(redis.call('ZSCORE', idle, tenant) or 0)
  redis.call('ZREM', idle, tenant)
  redis.call('ZADD', lane_key(tag, 'active', model, lane), math.max(own, lane_clock(tag, model, lane)),
    tenant)
end

-- It has none any more; what it is ahead of the clock is kept.
function fairness.deactivate(tag, model, lane, tenant)
  local active = lane_key(tag, 'active', model, lane)
  local own = tonumber(redis.call('ZSCORE', active, tenant) or 0)
  redis.call('ZREM', active, tenant)
  local idle, now = lane_key(tag, 'idle', model, lane), lane_clock(tag, model, lane)
  if own > now then redis.call('ZADD', idle, own, tenant) end
  redis.call('ZREMRANGEBYSCORE', idle, '-inf', now)
end

-- Adds tokens to what the tenant was handed out; gives back where they are negative.
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

-- A job is handed out from its tenant's line; `charged` is still to be kept in its record.
function fairness.charge(tag, job)
  local active = lane_key(tag, 'active', job.model, job.lane)
  local own = tonumber(redis.call('ZSCORE', active, job.tenant))
  if own > lane_clock(tag, job.model, job.lane) then
    redis.call('SET', lane_key(tag, 'clock', job.model, job.lane), string.format('%.17g', own))
  end
  redis.call('ZINCRBY', active, job.cost / fairness.weight(tag, job.tenant), job.tenant)
  job.charged = job.cost
end

-- The job was worth so much in the end; what it was charged beyond goes back.
function fairness.settle(tag, job, charge)
  if job.charged > 0 then
    fairness.add_tokens(tag, job.model, job.lane, job.tenant, charge - job.charged)
  end
end

-- A job that was charged moves to another lane, with its charge or, to wait there anew, without.
function fairness.move(tag, job, lane, keeps)
  if job.charged == 0 then return end
  fairness.add_tokens(tag, job.model, job.lane, job.tenant, -job.charged)
  if keeps then
    fairness.add_tokens(tag, job.model, lane, job.tenant, job.charged)
  else
    job.charged = 0
    redis.call('HSET', job.key, 'charged', 0)
  end
end

-- The places and tokens of a lane at a worker, and what tenants hold of them, from the words of a
-- claim: from the fifth on {places, tokens, tenant, places, tokens, tenant, …}.
function fairness.parse_slots(tag, words)
  local fair = {slots = tonumber(words[5]), tokens = tonumber(words[6]), weight = 0, held = {}}
  for i = 7, #words, 3 do
    fairness.add_held(tag, fair, words[i], tonumber(words[i + 1]), tonumber(words[i + 2]))
  end
  return fair
end

-- The largest job that a tenant may be handed, in tokens: 0 or less where one more place would give
-- it more than its share by weight, among those that hold any and itself.
function fairness.tenant_room(tag, fair, tenant)
  local held = fair.held[tenant]
  local slots, tokens, weight = 0, 0, fairness.weight(tag, tenant)
  local sum = fair.weight
  if held then slots, tokens = held.slots, held.tokens else sum = sum + weight end
  if slots + 1 > math.floor(fair.slots * weight / sum) then return 0 end
  return math.floor(fair.tokens * weight / sum) - tokens
end

-- The tenant holds places of the lane, for so many choices and tokens.
function fairness.add_held(tag, fair, tenant, choices, cost)
  local held = fair.held[tenant]
  if not held then
    held = {slots = 0, tokens = 0}
    fair.held[tenant] = held
    fair.weight = fair.weight + fairness.weight(tag, tenant)
  end
  held.slots, held.tokens = held.slots + choices, held.tokens + cost
end
