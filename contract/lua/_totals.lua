-- What has happened to a model's jobs since counting began, by lane: hash totals:<model>, whole
-- numbers that never fall. A field is `<metric>:<lane>[:<label>]`; a histogram's are `…:<bucket>`,
-- from 1 on, the one past the last bound being +Inf, and `…:sum` (us). contract/telemetry/metrics.py names
-- them all. Counted where it happens, so that neither a worker's nor a gateway's death loses any.
local TOTALS_TTL_MS = 30 * 24 * 3600 * 1000
local REPORTED_TTL_MS = 24 * 3600 * 1000
local LATENCY_BOUNDS_MS = {
  5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 1800000, 7200000,
}

function totals.add(tag, model, field, value)
  redis.call('HINCRBY', tag .. ':totals:' .. model, field, string.format('%.0f', value))
end

-- Adds to several fields: {field, value, …}.
local function add_all(tag, model, gains)
  local key, fields = tag .. ':totals:' .. model, {}
  for i = 1, #gains, 2 do table.insert(fields, gains[i]) end
  for i, value in ipairs(redis.call('HMGET', key, unpack(fields))) do
    gains[2 * i] = string.format('%.0f', (value or 0) + gains[2 * i])
  end
  redis.call('HSET', key, unpack(gains))
end

-- One more observation of a job's latency, beside a field that grows with it.
local function observe(tag, job, metric, ms, field, value)
  local bucket, name = 1, metric .. ':' .. job.lane
  while LATENCY_BOUNDS_MS[bucket] and ms > LATENCY_BOUNDS_MS[bucket] do bucket = bucket + 1 end
  add_all(tag, job.model, {field, value, name .. ':' .. bucket, 1, name .. ':sum', ms * 1000})
end

function totals.age(job, now)
  return math.max(0, now - job.created)
end

-- A worker has taken the job.
function totals.claimed(tag, job, now, is_first)
  local attempts = 'attempts_total:' .. job.lane
  if is_first then
    observe(tag, job, 'request_queue_time_seconds', totals.age(job, now), attempts, 1)
  else
    totals.add(tag, job.model, attempts, 1)
  end
end

-- Output came into a job's log, its first.
function totals.first_output(tag, job, now)
  observe(tag, job, 'time_to_first_token_seconds', totals.age(job, now),
    'prompt_tokens_total:' .. job.lane, job.prompt_tokens)
end

function totals.ended(tag, job, status, now)
  local requests = 'requests_total:' .. job.lane .. ':' .. status
  if status == 'succeeded' then
    observe(tag, job, 'e2e_request_latency_seconds', totals.age(job, now), requests, 1)
  else
    totals.add(tag, job.model, requests, 1)
  end
end

-- Adds what a worker has counted since it last said so: {field: its own total}. Each counts once,
-- also where a heartbeat comes twice, or late.
function totals.merge(tag, model, incarnation, counted)
  local key = tag .. ':told:' .. incarnation
  local raw = redis.call('GET', key)
  local reported = raw and cmsgpack.unpack(raw) or {}
  for field, value in pairs(counted) do
    local gained = value - (reported[field] or 0)
    if gained > 0 then
      totals.add(tag, model, field, gained)
      reported[field] = value
    end
  end
  redis.call('SET', key, cmsgpack.pack(reported), 'PX', REPORTED_TTL_MS)
  redis.call('PEXPIRE', tag .. ':totals:' .. model, TOTALS_TTL_MS)
end
