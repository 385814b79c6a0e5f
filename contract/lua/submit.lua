-- submit: accepts a job, or says why it is refused and when to retry.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant  3 model  4 lane  5 job (msgpack)  6 terms (a msgpack map):
--       prompt_tokens, max_tokens (output cap, all choices), choices,
--       expected_tokens (what the caller expects of them; absent, 0: nothing),
--       is_steered (the caller named what may end the output; absent: no),
--       start_ms (Unix time of the Redis clock before which it does not start; absent, 0: none),
--       asked_model (the route that chose the model; absent, '': none),
--       is_chat (a chat that its caller stores; absent: no),
--       priority (within its tenant's queue: lower is earlier, -2^19 to 2^19 - 1; absent: 0),
--       deadline_ms (from now, or from start_ms), ttl_ms (retention), max_attempts, version (of the wire),
--       attendance_ms (cancelled after this long without a caller; 0: never),
--       idem_key ('': none), idem_ttl_ms, body_hash,
--       lane_tokens, lane_wait_ms (bounds of the lane; 0: none),
--       weight (of the tenant, from now on; absent: 1),
--       requests_per_min, tokens_per_min, concurrent_tokens (limits of the tenant; 0: none),
--       batch_price (of a token in the lane `batch`, in the meter of tokens: 0 to 1; absent: 1),
--       cached_price (of a prompt's token found in the cache, likewise),
--       is_counted (enter has counted it as a request; absent: no),
--       lane_share (share of lane_tokens that the tenant's waiting jobs may use; 0: all),
--       stored_bytes (of the job until it is forgotten), max_tenant_bytes, max_bytes
--       (bounds of the stored bytes of its tenant, of all tenants; 0: none),
--       vector_bytes (of its output), logprob_bytes (of the log, for each output token; absent: 0),
--       prompt_logprob_bytes (of the log; absent: 0), is_passing (nobody reads its result once it has ended),
--       needs_worker (refuse without a live worker), cold_ms (until a first worker is up),
--       is_stored (the object store holds its prompt),
--       part ('parent': a flow's job, 'child': a call of one, 'nested': both, '': neither),
--       call_prompt_tokens (of a flow's calls, more than its own prompt; absent: 0),
--       channel (of its events, with those of other jobs; absent: its own),
--       callback_to (destination, '': no callback), callback_started (send a message at the start),
--       callback_every (output tokens between progress messages; 0: none)
--       7 metadata (msgpack map, '': none)  8 callback (msgpack, '': none)  9 marks of its session and its prompt's prefixes
--       (_residence.lua; absent, '': none)
-- reply {'OK', id, {jobs ahead, tokens ahead, ms until it starts (-1: unknown)}, rates}
--                                the place is {} until start_ms has come
--       {'EXISTS', id}           the same id or idempotency key was accepted before
--       {'MISMATCH', id}         the key was used with another body
--       {'MEMORY_FULL'}          what Redis holds beside jobs leaves no memory for any; the rest is
--                                for running jobs, and for the calls of flows
--       {'REFUSED', reason, limit, ms until a retry may succeed (-1: unknown), rates}
--         reason  unknown_lane, lane_paused, no_workers, storage_full, tenant_quota, lane_full,
--                 deadline_infeasible
--         limit   the limit exceeded: stored_bytes, requests_per_min, tokens_per_min,
--                 concurrent_tokens, lane_share, lane_tokens, lane_wait, lane_memory and
--                 tenant_memory (_memory.lua); for unknown_lane the lanes
--                 that the workers serve
--       rates     {requests left, ms until full, tokens left, ms until full}
local function known(tag, job, terms)
  local idem = terms.idem_key ~= '' and tag .. ':idem:' .. job.tenant .. ':' .. terms.idem_key
  local before = idem and redis.call('GET', idem)
  if before then
    local id, body = string.match(before, '^(%S+) (%S+)$')
    return {body == terms.body_hash and 'EXISTS' or 'MISMATCH', id}
  end
  if redis.call('EXISTS', job.key) == 1 then return {'EXISTS', job.id} end
  return nil, idem
end

local function accept(tag, job, terms, argv, found, now)
  local deadline = math.max(now, job.start) + terms.deadline_ms
  job.deadline, job.priority = deadline, terms.priority or 0
  job.arm = ab.assign(tag, job.model, job.id, now)
  local record = {'v', terms.version, 'tenant', job.tenant, 'model', job.model,
    'lane', job.lane, 'epoch', 0, 'attempt', 0, 'releases', 0, 'lapses', 0, 'crashes', 0,
    'next', 1, 'hash', '00000000', 'tokens', 0, 'cost', job.cost,
    'prompt_tokens', terms.prompt_tokens, 'max_tokens', terms.max_tokens,
    'choices', terms.choices,
    'max_attempts', terms.max_attempts, 'deadline', deadline, 'ttl_ms', terms.ttl_ms,
    'created', now, 'attendance', terms.attendance_ms, 'cold_ms', terms.cold_ms,
    'predicted', found.wait,
    'metered', terms.tokens_per_min, 'job', argv[5],
    'metadata', argv[7], 'has_objects', terms.is_stored and '1' or '', 'fixed', job.fixed,
    'token_bytes', job.token_bytes}
  if job.start > now then redis.call('HSET', job.key, 'start', job.start) end
  if job.priority ~= 0 then redis.call('HSET', job.key, 'priority', job.priority) end
  if (argv[9] or '') ~= '' then redis.call('HSET', job.key, 'marks', argv[9]) end
  if terms.is_steered then redis.call('HSET', job.key, 'steered', '1') end
  if terms.is_passing then redis.call('HSET', job.key, 'passing', '1') end
  if (terms.part or '') ~= '' then redis.call('HSET', job.key, 'part', terms.part) end
  for _, price in ipairs({'batch_price', 'cached_price'}) do
    if (terms[price] or 1) ~= 1 then redis.call('HSET', job.key, price, terms[price]) end
  end
  if (terms.channel or '') ~= '' then redis.call('HSET', job.key, 'channel', terms.channel) end
  if (terms.asked_model or '') ~= '' then redis.call('HSET', job.key, 'asked_model', terms.asked_model) end
  if job.arm ~= '' then redis.call('HSET', job.key, 'arm', job.arm) end
  if terms.callback_to ~= '' then
    redis.call('HSET', job.key, 'callback', argv[8], 'callback_to', terms.callback_to,
      'callback_started', terms.callback_started and 1 or 0,
      'callback_every', terms.callback_every)
  end
  for _, name in ipairs({job.tenant, ''}) do redis.call('ZADD', tag .. ':jobs:' .. name, now, job.id) end
  if terms.is_chat then redis.call('ZADD', tag .. ':chats:' .. job.tenant, now, job.id) end
  redis.call('ZADD', tag .. ':deadlines', deadline, job.id)
  if terms.attendance_ms > 0 then
    redis.call('ZADD', tag .. ':attended', now + terms.attendance_ms, job.id)
  end
  fairness.set_weight(tag, job.tenant, job.weight)
  ledger.reserve(tag, job)
  ledger.store(tag, job, terms.stored_bytes)
  admission.charge(tag, job, found.tenant, terms, now)
  enqueue(tag, job, job.start > now and later.stream(job) or tenant_stream(job), record)
end

local function submit(keys, argv)
  local tag, now, terms = keys[1], now_ms(), cmsgpack.unpack(argv[6])
  local job = {
    id = argv[1], key = tag .. ':job:' .. argv[1], tenant = argv[2], model = argv[3], lane = argv[4],
  }
  if terms.is_counted then  -- it counts again where it is accepted
    admission.count_request(tag, job.tenant, admission.tenant(tag, job.tenant, terms, now), -1, terms, now)
  end
  local reply, idem = known(tag, job, terms)
  if reply then return reply end
  job.part, job.created, job.start = terms.part, now, terms.start_ms or 0
  job.num_sent = #argv[5] + #argv[7] + 2 * #argv[8] + #(argv[9] or '')
  local room = memory.room(tag, true)
  -- A flow that has been accepted must be able to end: its calls may use the reserve.
  if not ledger.is_call(job) and room <= 0 then
    totals.refused(tag, job, 'memory_full')
    return {'MEMORY_FULL'}
  end
  local found = admission.evaluate(tag, job, terms, now, room)
  local limit = found.refusal and found.refusal[2]
  if (limit == 'lane_memory' or limit == 'tenant_memory') and memory.make_room(tag, job.lane, now) then
    found = admission.evaluate(tag, job, terms, now, room)
  end
  if found.refusal then
    local reason, limit, retry_ms = unpack(found.refusal)
    if found.promised then promises.book(tag, job, found.promised, now) end
    totals.refused(tag, job, reason)
    return {'REFUSED', reason, limit, retry_ms, admission.rates(found.tenant, terms)}
  end
  if found.ahead.jobs == 0 and found.wait == 0 then promises.forget(tag, job) end
  accept(tag, job, terms, argv, found, now)
  if idem then redis.call('SET', idem, job.id .. ' ' .. terms.body_hash, 'PX', terms.idem_ttl_ms) end
  local place = job.start > now and {} or {found.ahead.jobs, found.ahead.tokens, found.wait}
  return {'OK', job.id, place, admission.rates(found.tenant, terms)}
end
-- Its own check of the memory leaves out what clients are sending, Redis's does not.
register('submit', submit, 'allow-oom')
