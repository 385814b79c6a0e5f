-- submit: accepts a job, all or nothing.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant  3 model  4 lane  5 cost (prompt + output cap, tokens)  6 prompt tokens
--       7 output cap (tokens, all choices)  8 deadline (ms from now)  9 retention (ms)
--       10 attempts at most  11 lane bound (tokens, 0: none)  12 idempotency key ('': none)
--       13 body hash  14 retention of the idempotency key (ms)  15 wire version
--       16 attendance (ms, 0: none): without a caller for so long, the job is cancelled
--       17 job (msgpack)  18 metadata (msgpack map, '': none)
--       19 '1' where its prompt lies in the object store
-- reply {'OK', id, queued jobs before it, queued tokens before it}
--       {'EXISTS', id}           the same id or idempotency key was accepted before
--       {'MISMATCH', id}         the key was used with another body
--       {'LANE_FULL', queued jobs, queued tokens}
--       {'MEMORY_FULL'}          the rest of the memory is for the jobs that run
local MEMORY_SHARE = 0.8    -- of maxmemory, up to which jobs are taken on
local MEMORY_KNOWN_MS = 100  -- what was found out is good for so long: INFO costs as much as submit

-- Whether so much memory is in use that running jobs may need what is left. Where no maxmemory is
-- set, never.
local function is_memory_full(tag)
  local known = redis.call('GET', tag .. ':memory')
  if not known then
    local info = redis.call('INFO', 'memory')
    local function figure(name) return tonumber(string.match(info, name .. ':(%d+)') or 0) end
    local used = figure('\nused_memory') - figure('mem_not_counted_for_evict')
    local most = figure('\nmaxmemory')
    known = most > 0 and used > MEMORY_SHARE * most and 'full' or 'free'
    redis.call('SET', tag .. ':memory', known, 'PX', MEMORY_KNOWN_MS)
  end
  return known == 'full'
end

local function submit(keys, argv)
  local tag = keys[1]
  local idem = argv[12] ~= '' and (tag .. ':idem:' .. argv[2] .. ':' .. argv[12])
  local known = idem and redis.call('GET', idem)
  if known then
    local id, body = string.match(known, '^(%S+) (%S+)$')
    return {body == argv[13] and 'EXISTS' or 'MISMATCH', id}
  end
  local job = {
    id = argv[1], key = tag .. ':job:' .. argv[1], tenant = argv[2], model = argv[3],
    lane = argv[4], cost = tonumber(argv[5]),
  }
  if redis.call('EXISTS', job.key) == 1 then return {'EXISTS', job.id} end
  if is_memory_full(tag) then return {'MEMORY_FULL'} end
  local counters = redis.call('HMGET', tag .. ':counters:' .. job.model .. ':' .. job.lane,
    'queued_jobs', 'queued_tokens')
  local queued_jobs, queued_tokens = tonumber(counters[1] or 0), tonumber(counters[2] or 0)
  local bound = tonumber(argv[11])
  if bound > 0 and queued_tokens + job.cost > bound then
    return {'LANE_FULL', queued_jobs, queued_tokens}
  end

  local now = now_ms(tag)
  local deadline = now + tonumber(argv[8])
  redis.call('HSET', job.key, 'v', argv[15], 'tenant', argv[2], 'model', job.model,
    'lane', job.lane, 'epoch', 0, 'attempt', 0, 'releases', 0, 'lapses', 0, 'crashes', 0,
    'next', 1, 'hash', '00000000', 'tokens', 0, 'cost', job.cost, 'prompt_tokens', argv[6],
    'max_tokens', argv[7], 'max_attempts', argv[10], 'deadline', deadline, 'ttl_ms', argv[9],
    'created', now, 'attendance', argv[16], 'job', argv[17],
    'metadata', argv[18], 'has_objects', argv[19])
  redis.call('ZADD', tag .. ':jobs:' .. job.tenant, now, job.id)
  redis.call('ZADD', tag .. ':deadlines', deadline, job.id)
  if tonumber(argv[16]) > 0 then
    redis.call('ZADD', tag .. ':attended', now + tonumber(argv[16]), job.id)
  end
  if idem then redis.call('SET', idem, job.id .. ' ' .. argv[13], 'PX', argv[14]) end

  activate(tag, job)
  enqueue(tag, job, 'q:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant)
  return {'OK', job.id, queued_jobs, queued_tokens}
end
redis.register_function('batchway_v1_submit', submit)
