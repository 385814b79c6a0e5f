-- What has happened to a model's jobs since counting began, by lane: hash totals:<model>, whole
-- numbers that never fall. A field is `<metric>:<lane>[:<label>]`; a histogram's are `…:<bucket>`,
-- from 1 on, the one past the last bound being +Inf, and `…:sum` (us). telemetry/metrics.py names
-- them all. Counted where it happens, so that neither a worker's nor a gateway's death loses any.
local TOTALS_TTL_MS = 30 * 24 * 3600 * 1000
local TOLD_TTL_MS = 24 * 3600 * 1000
local LATENCY_BOUNDS_MS = {
  5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 1800000, 7200000,
}

function totals.add(tag, model, field, value)
  redis.call('HINCRBY', tag .. ':totals:' .. model, field, string.format('%.0f', value))
end

-- One more observation of a job's latency.
function totals.observe(tag, job, metric, ms)
  local bucket = 1
  while LATENCY_BOUNDS_MS[bucket] and ms > LATENCY_BOUNDS_MS[bucket] do bucket = bucket + 1 end
  totals.add(tag, job.model, metric .. ':' .. job.lane .. ':' .. bucket, 1)
  totals.add(tag, job.model, metric .. ':' .. job.lane .. ':sum', ms * 1000)
end

function totals.age(job, now)
  return math.max(0, now - job.created)
end

-- A worker has taken the job.
function totals.claimed(tag, job, now, is_first)
  totals.add(tag, job.model, 'attempts_total:' .. job.lane, 1)
  if is_first then totals.observe(tag, job, 'request_queue_time_seconds', totals.age(job, now)) end
end

-- Output came into a job's log, its first.
function totals.began(tag, job, now)
  totals.add(tag, job.model, 'prompt_tokens_total:' .. job.lane, job.prompt_tokens)
  totals.observe(tag, job, 'time_to_first_token_seconds', totals.age(job, now))
end

function totals.ended(tag, job, status, now)
  totals.add(tag, job.model, 'requests_total:' .. job.lane .. ':' .. status, 1)
  if status == 'succeeded' then
    totals.observe(tag, job, 'e2e_request_latency_seconds', totals.age(job, now))
  end
end

-- Adds what a worker has counted since it last said so: {field: its own total}. Each counts once,
-- also where a heartbeat comes twice, or late.
function totals.take_in(tag, model, incarnation, counted)
  local key = tag .. ':told:' .. incarnation
  local raw = redis.call('GET', key)
  local told = raw and cmsgpack.unpack(raw) or {}
  for field, value in pairs(counted) do
    local gained = value - (told[field] or 0)
    if gained > 0 then
      totals.add(tag, model, field, gained)
      told[field] = value
    end
  end
  redis.call('SET', key, cmsgpack.pack(told), 'PX', TOLD_TTL_MS)
  redis.call('PEXPIRE', tag .. ':totals:' .. model, TOTALS_TTL_MS)
end
