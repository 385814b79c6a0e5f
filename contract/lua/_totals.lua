-- Totals of a model's jobs by lane: the hash `totals:<model>` of whole numbers that never decrease. A
-- field is `<metric>:<lane>[:<label>]`; a histogram has `…:<bucket>` from 1 on, the last for +Inf, and
-- `…:sum` (us). contract/telemetry/metrics.py lists the metrics. Functions count with each transition,
-- so that no count is lost when a worker or gateway dies.
-- requires shared
local TOTALS_TTL_MS = 30 * 24 * 3600 * 1000
local REPORTED_TTL_MS = 24 * 3600 * 1000
local LATENCY_BOUNDS_MS = {
  5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 1800000, 7200000,
}

function totals.add(tag, model, field, value)
  redis.call('HINCRBY', tag .. ':totals:' .. model, field, string.format('%.0f', value))
end

-- Adds an observation to a latency histogram, and with `field` a value to another field.
function totals.observe(tag, model, series, ms, field, value)
  local bucket = 1
  while LATENCY_BOUNDS_MS[bucket] and ms > LATENCY_BOUNDS_MS[bucket] do bucket = bucket + 1 end
  local gains = {series .. ':' .. bucket, 1, series .. ':sum', ms * 1000}
  if field then gains[5], gains[6] = field, value end
  add_to(tag .. ':totals:' .. model, gains)
end

local function observe(tag, job, metric, ms, field, value)
  totals.observe(tag, job.model, metric .. ':' .. job.lane, ms, field, value)
end

-- ms since the job was submitted, or since it could start.
function totals.age(job, now)
  return math.max(0, now - math.max(job.created, job.start))
end

-- Counts a claim.
function totals.claimed(tag, job, now, is_first)
  local attempts = 'attempts_total:' .. job.lane
  if is_first then
    observe(tag, job, 'request_queue_time_seconds', totals.age(job, now), attempts, 1)
  else
    totals.add(tag, job.model, attempts, 1)
  end
end

-- Counts a job's first output.
function totals.first_output(tag, job, now)
  observe(tag, job, 'time_to_first_token_seconds', totals.age(job, now),
    'prompt_tokens_total:' .. job.lane, job.prompt_tokens)
end

-- Counts a refusal. No worker may ever have served the model, so the totals expire from here on, too.
function totals.refused(tag, job, reason)
  totals.add(tag, job.model, 'refusals_total:' .. job.lane .. ':' .. reason, 1)
  redis.call('PEXPIRE', tag .. ':totals:' .. job.model, TOTALS_TTL_MS)
end

function totals.ended(tag, job, status, now)
  local requests = 'requests_total:' .. job.lane .. ':' .. status
  if status == 'succeeded' then
    observe(tag, job, 'e2e_request_latency_seconds', totals.age(job, now), requests, 1)
  else
    totals.add(tag, job.model, requests, 1)
  end
end

-- Adds the growth of a worker's own totals, {field: total}, since its last report. A repeated or late
-- heartbeat adds nothing twice.
function totals.merge(tag, model, incarnation, counted)
  local key = tag .. ':told:' .. incarnation
  local raw = redis.call('GET', key)
  local reported, gains = raw and cmsgpack.unpack(raw) or {}, {}
  for field, value in pairs(counted) do
    local gained = value - (reported[field] or 0)
    if gained > 0 then
      gains[#gains + 1], gains[#gains + 2] = field, gained
      reported[field] = value
    end
  end
  if #gains > 0 then add_to(tag .. ':totals:' .. model, gains) end
  redis.call('SET', key, cmsgpack.pack(reported), 'PX', REPORTED_TTL_MS)
  redis.call('PEXPIRE', tag .. ':totals:' .. model, TOTALS_TTL_MS)
end
