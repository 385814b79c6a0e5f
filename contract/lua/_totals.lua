-- Totals of a model's jobs by lane: the hash `totals:<model>` of whole numbers that never decrease. A
-- field is `<metric>:<lane>[:<label>]`; a histogram has `…:<bucket>` from 1 on, the last for +Inf, and
-- `…:sum` (us). contract/telemetry/metrics.py lists the metrics. Functions count with each transition,
-- so that no count is lost when a worker or gateway dies.
local TOTALS_TTL_MS = 30 * 24 * 3600 * 1000
local REPORTED_TTL_MS = 24 * 3600 * 1000
local LATENCY_BOUNDS_MS = {
  5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 1800000, 7200000,
}

function totals.add(tag, model, field, value)
  redis.call('HINCRBY', tag .. ':totals:' .. model, field, string.format('%.0f', value))
end

-- Adds an observation to a latency histogram.
function totals.observe(tag, model, series, ms)
  local bucket = 1
  while LATENCY_BOUNDS_MS[bucket] and ms > LATENCY_BOUNDS_MS[bucket] do bucket = bucket + 1 end
  totals.add(tag, model, series .. ':' .. bucket, 1)
  totals.add(tag, model, series .. ':sum', ms * 1000)
end

local function observe_age(tag, job, metric, now)
  totals.observe(tag, job.model, metric .. ':' .. job.lane, totals.age(job, now))
end

function totals.age(job, now)
  return math.max(0, now - job.created)
end

-- Counts a claim.
function totals.claimed(tag, job, now, is_first)
  totals.add(tag, job.model, 'attempts_total:' .. job.lane, 1)
  if is_first then observe_age(tag, job, 'request_queue_time_seconds', now) end
end

-- Counts a job's first output.
function totals.first_output(tag, job, now)
  observe_age(tag, job, 'time_to_first_token_seconds', now)
  totals.add(tag, job.model, 'prompt_tokens_total:' .. job.lane, job.prompt_tokens)
end

function totals.ended(tag, job, status, now)
  totals.add(tag, job.model, 'requests_total:' .. job.lane .. ':' .. status, 1)
  if status == 'succeeded' then observe_age(tag, job, 'e2e_request_latency_seconds', now) end
end

-- Adds the growth of a worker's own totals, {field: total}, since its last report. A repeated or late
-- heartbeat adds nothing twice.
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
