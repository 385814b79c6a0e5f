-- claim: hands waiting jobs to a worker with room, lanes in the given order; within a lane first
-- what was given back, then tenants by virtual counter. Stops at the first job that does not fit,
-- so that nothing small overtakes something large for ever.
-- A job under suspicion runs alone: one worker in four at most gets the turn to run one, is handed
-- nothing else while it empties itself, and then that job alone.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 model  3 lease (ms)  4 jobs at most  5 tokens at most
--       6 '1' where the worker holds nothing  7 version of its configuration  8… lanes
-- reply list of {id, epoch, attempt, next event number, hash, output tokens logged,
--                ms to its deadline, 1 where it must run alone, job (msgpack)}

-- The next entry that no worker has been handed: {entry, job id, cost}, or nil.
local function peek(key)
  if redis.call('EXISTS', key) == 0 then return nil end
  local group = redis.call('XINFO', 'GROUPS', key)[1]
  local last = '0-0'
  for i = 1, #group, 2 do
    if group[i] == 'last-delivered-id' then last = group[i + 1] end
  end
  local entries = redis.call('XRANGE', key, '(' .. last, '+', 'COUNT', 1)
  if #entries == 0 then return nil end
  local fields = entries[1][2]
  return {entry = entries[1][1], id = fields[2], cost = tonumber(fields[4])}
end

-- Takes the peeked entry; nil where its job has expired meanwhile.
local function take(tag, key, waiting, incarnation, lease_ms, now, config)
  redis.call('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', 1, 'STREAMS', key, '>')
  local job = load_job(tag, waiting.id)
  if not job or job.state ~= 'queued' or job.entry ~= waiting.entry then
    redis.call('XACK', key, GROUP, waiting.entry)
    redis.call('XDEL', key, waiting.entry)
    return nil
  end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return nil
  end
  ledger.count(tag, job, 'queued', -1)
  ledger.count(tag, job, 'running', 1)
  job.epoch, job.attempt = job.epoch + 1, job.attempt + 1
  redis.call('HSET', job.key, 'state', 'claimed', 'owner', incarnation, 'epoch', job.epoch,
    'attempt', job.attempt, 'config', config)
  local is_first = redis.call('HSETNX', job.key, 'claimed', now) == 1
  if is_first and redis.call('HGET', job.key, 'callback_started') == '1' then
    outbox.post(tag, job, 'started', now, '', '')
  end
  redis.call('ZADD', tag .. ':leases', now + lease_ms, job.id)
  redis.call('SADD', tag .. ':own:' .. incarnation, job.id)
  return handed_out(tag, job, now)
end

-- Whether this worker has the turn to run a suspect of the model; a turn is `<worker> <until ms>`.
local function has_turn(tag, model, incarnation, lease_ms, now)
  local queue, turn = tag .. ':q:' .. model .. ':suspect', tag .. ':turn:' .. model
  if not peek(queue) then return false end
  local holder, until_ms = string.match(redis.call('GET', turn) or '', '^(%S+) (%d+)$')
  if not holder or tonumber(until_ms) <= now then
    local quota = math.max(1, math.floor(redis.call('ZCARD', tag .. ':workers:' .. model) / 4))
    if redis.call('SCARD', tag .. ':alone:' .. model) >= quota then return false end
    holder = incarnation
  end
  if holder ~= incarnation then return false end
  redis.call('SET', turn, string.format('%s %d', incarnation, now + lease_ms))
  return true
end

-- The suspect that a worker with the turn and nothing else to do runs next; none where all expired.
local function claim_suspect(tag, model, incarnation, lease_ms, now, config)
  local queue = tag .. ':q:' .. model .. ':suspect'
  local waiting = peek(queue)
  while waiting do
    local job = take(tag, queue, waiting, incarnation, lease_ms, now, config)
    if job then
      redis.call('SADD', tag .. ':alone:' .. model, waiting.id)
      redis.call('DEL', tag .. ':turn:' .. model)
      return {job}
    end
    waiting = peek(queue)
  end
  return {}
end

local function claim(keys, argv)
  local tag, incarnation, model, lease_ms = keys[1], argv[1], argv[2], tonumber(argv[3])
  local max_jobs, max_tokens = tonumber(argv[4]), tonumber(argv[5])
  local now = now_ms(tag)
  local claimed, tokens = {}, 0
  if has_turn(tag, model, incarnation, lease_ms, now) then
    return argv[6] == '1' and claim_suspect(tag, model, incarnation, lease_ms, now, argv[7])
      or {}
  end

  -- True while the worker has room left.
  local function drain(key, on_taken)
    while #claimed < max_jobs do
      local waiting = peek(key)
      if not waiting then return true end
      if tokens + waiting.cost > max_tokens then return false end
      local job = take(tag, key, waiting, incarnation, lease_ms, now, argv[7])
      if job then
        tokens = tokens + waiting.cost
        table.insert(claimed, job)
        if on_taken then
          on_taken(waiting.cost)
          return true
        end
      end
    end
    return false
  end

  for i = 8, #argv do
    local lane = argv[i]
    if not drain(tag .. ':back:' .. model .. ':' .. lane) then return claimed end
    local active = tag .. ':active:' .. model .. ':' .. lane
    local tenant = redis.call('ZRANGE', active, 0, 0)[1]
    while tenant do
      local taken = false
      local room = drain(tag .. ':q:' .. model .. ':' .. lane .. ':' .. tenant, function(cost)
        taken = true
        redis.call('ZINCRBY', active, cost, tenant)
      end)
      if not room then return claimed end
      if not taken then redis.call('ZREM', active, tenant) end
      tenant = redis.call('ZRANGE', active, 0, 0)[1]
    end
  end
  return claimed
end
redis.register_function{
  function_name = 'batchway_v1_claim', callback = claim, flags = {'allow-oom'},
}
