-- Two batching configurations on one model's jobs. While a worker of the candidate and one of the
-- control live, each new job is assigned to one of them by a hash of its id, and only that arm's workers
-- claim it; an arm without a live worker leaves its jobs to the other. Jobs of the candidate wait in
-- streams of their own, so a slow arm delays its own jobs only.
-- `ab:<model>` holds what heartbeats said last: `share` of the jobs for the candidate, the version of
-- each arm's configuration (`candidate`, `control`), and the time (ms) until which it counts as live
-- (`candidate_until`, …). `ab_jobs:<model>` is a stream of ended jobs, field `j`: msgpack of the list in
-- ab.ended. The totals count the jobs by version.
-- requires shared, pools

local AB_TTL_MS = 7 * 24 * 3600 * 1000
local MAX_AB_JOBS = 20000   -- kept for reports
local DEFAULT = 'default'   -- the version of a worker without a file
local MAX_VERSIONS = 8      -- of a model, that the totals count
local STREAM_ENDS = {control = '', candidate = ' candidate'}  -- a tenant's name has no space

-- Stores what a live worker's heartbeat says: `info` (JSON) holds its version (`batching`) and, where it
-- runs the candidate, `candidate_share`.
function ab.report(tag, model, info, now, lease_ms)
  local is_readable, said = pcall(cjson.decode, info)
  if not is_readable or type(said) ~= 'table' then return end
  local key, share = tag .. ':ab:' .. model, tonumber(said.candidate_share)
  if not share and redis.call('EXISTS', key) == 0 then return end
  local arm = share and 'candidate' or 'control'
  local version = type(said.batching) == 'string' and string.match(said.batching, '^%w+$')
  redis.call('HSET', key, arm, version or DEFAULT, arm .. '_until',
    now + math.max(WORKER_TTL_MS, lease_ms))
  if share then
    redis.call('HSET', key, 'share', share)
    redis.call('PEXPIRE', key, AB_TTL_MS)
  end
end

local function submitted_field(version)
  return 'config_submitted_total:' .. version
end

-- Makes room in the totals for a version: with MAX_VERSIONS there, drops all but the present two.
local function admit_version(tag, model, version, control, candidate)
  local key, known, num_known = tag .. ':totals:' .. model, {}, 0
  if redis.call('HEXISTS', key, submitted_field(version)) == 1 then return end
  local counts = redis.call('HGETALL', key)
  for i = 1, #counts, 2 do
    local config = string.match(counts[i], '^config_[^:]*:([^:]*)')
    if config and not known[config] then
      known[config], num_known = {}, num_known + 1
    end
    if config then table.insert(known[config], counts[i]) end
  end
  if num_known < MAX_VERSIONS then return end
  known[control], known[candidate] = nil, nil
  for _, fields in pairs(known) do redis.call('HDEL', key, unpack(fields)) end
end

-- The arm of a new job, `<arm> <version>`; '' where no two arms live.
function ab.assign(tag, model, id, now)
  local share, candidate, candidate_until, control, control_until = unpack(redis.call('HMGET',
    tag .. ':ab:' .. model, 'share', 'candidate', 'candidate_until', 'control', 'control_until'))
  if not string.find(candidate or '', '^%w+$') or not string.find(control or '', '^%w+$') then
    return ''
  end
  if (tonumber(candidate_until) or 0) <= now or (tonumber(control_until) or 0) <= now then return '' end
  local drawn = tonumber(string.sub(server().sha1hex(candidate .. id), 1, 8), 16) / 2 ^ 32
  local arm, version = 'control', control
  if drawn < (tonumber(share) or 0) then arm, version = 'candidate', candidate end
  admit_version(tag, model, version, control, candidate)
  totals.add(tag, model, submitted_field(version), 1)
  return arm .. ' ' .. version
end

-- The end of the name of a tenant's stream for jobs of this arm.
function ab.stream_end(arm)
  return string.sub(arm or '', 1, 10) == 'candidate ' and STREAM_ENDS.candidate or ''
end

-- The ends of the names of the streams from which a worker claims.
function ab.searched(tag, model, is_candidate, now)
  local candidate, candidate_until, control_until = unpack(redis.call('HMGET', tag .. ':ab:' .. model,
    'candidate', 'candidate_until', 'control_until'))
  if not candidate then return {''} end
  local own, other = 'control', 'candidate'
  local other_until = candidate_until
  if is_candidate then own, other, other_until = 'candidate', 'control', control_until end
  if (tonumber(other_until) or 0) > now then return {STREAM_ENDS[own]} end
  return {STREAM_ENDS[own], STREAM_ENDS[other]}
end

local function choices_of(job) return math.max(1, job.choices) end

-- Counts the end of a job with an arm, unless its version was dropped from the totals.
local function count_end(tag, job, version, status, first, now)
  local model = job.model
  if redis.call('HEXISTS', tag .. ':totals:' .. model, submitted_field(version)) == 0 then return end
  totals.add(tag, model, 'config_requests_total:' .. version .. ':' .. status, 1)
  totals.add(tag, model, 'config_generation_tokens_total:' .. version, job.tokens)
  if status ~= 'succeeded' then return end
  totals.observe(tag, model, 'config_e2e_request_latency_seconds:' .. version, totals.age(job, now))
  if first == 0 then return end
  totals.observe(tag, model, 'config_time_to_first_token_seconds:' .. version, totals.age(job, first))
  local gaps = job.tokens / choices_of(job) - 1  -- between the tokens of one choice
  if gaps >= 1 then
    totals.observe(tag, model, 'config_inter_token_latency_seconds:' .. version,
      math.max(0, now - first) / gaps)
  end
end

-- Counts the end of a job with an arm and keeps what a report needs of it; nothing of its text.
function ab.ended(tag, job, status, now)
  local arm, version = string.match(job.arm or '', '^(%S+) (%S+)$')
  if not arm then return end
  local config, claimed, first = unpack(redis.call('HMGET', job.key, 'config', 'claimed', 'first_token'))
  claimed, first = whole_number(claimed or 0) or 0, whole_number(first or 0) or 0
  local served = claimed == 0 and '' or config and config ~= '' and config or DEFAULT
  count_end(tag, job, version, status, first, now)
  local key = tag .. ':ab_jobs:' .. job.model
  redis.call('XADD', key, 'MAXLEN', '~', MAX_AB_JOBS, '*', 'j', cmsgpack.pack({
    arm, version, served, job.lane, status, job.prompt_tokens, job.tokens,
    choices_of(job), job.attempt, job.created, claimed, first, now,
  }))
  redis.call('PEXPIRE', key, AB_TTL_MS)
end
