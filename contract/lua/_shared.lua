#!lua name=batchway_v1
-- Code that the functions share. Every function gets one key, the partition's tag `{bw:<ns>:<p>}`, and
-- derives all others from it, so that all keys are in one slot of a cluster.
-- Rules: Redis TIME is the only clock; only terminal() sets a terminal state; a function does not
-- raise after its first write; every function may be repeated.

-- redis.call that repairs keys which other programs overwrote: deletes a key of the wrong type or a
-- field that is not a number, counts a correction of kind `type`, and repeats the command. Sweeps
-- restore the content.
local function server() return redis end  -- `redis` is another table while the library is loaded
local redis = {register_function = redis.register_function}

function redis.call(name, ...)
  local reply = server().pcall(name, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  local key, field = ...
  if name == 'XINFO' or name == 'XGROUP' then error(reply) end  -- their key is the second argument
  local is_log = string.find(reply.err, 'equal or smaller', 1, true)  -- a log that holds a later event number
  if is_log or string.find(reply.err, 'WRONGTYPE', 1, true) then
    server().call('DEL', key)
  elseif string.find(reply.err, 'hash value is not an integer', 1, true) then
    server().call('HDEL', key, field)
  else
    error(reply)
  end
  server().call('HINCRBY', string.match(key, '^{[^}]*}') .. ':corrections', 'type', 1)
  return server().call(name, ...)
end

-- Registers a function of the library with one flag of Redis.
local function register(name, callback, flag)
  redis.register_function{
    function_name = 'batchway_v1_' .. name, callback = callback, flags = {flag},
  }
end

-- Calls a function on one record: its result and true, or nil and false where it raises. Errors of
-- access rules are raised again.
local function try(act, ...)
  local is_done, result = pcall(act, ...)
  if is_done then return result, true end
  local text = type(result) == 'table' and result.err or tostring(result)
  if string.find(text, 'ACL failure', 1, true) or string.find(text, 'user executing', 1, true) then
    error(result)
  end
  return nil, false
end

local GROUP = 'workers'  -- one consumer group per queue stream; the job's record names the owner
local CONSUMER = 'worker'
local TERMINAL = {succeeded = true, failed = true, cancelled = true, expired = true}
local OPEN = {queued = true, claimed = true, streaming = true}

-- Fields of a job's record that its caller may read.
local VIEW_FIELDS = {
  'state', 'lane', 'attempt', 'next', 'tokens', 'prompt_tokens', 'created', 'claimed',
  'first_token', 'finished', 'deadline', 'code', 'message', 'metadata', 'result', 'job',
  'predicted', 'runs', 'start', 'cached',
}

-- Fields of a job's record that functions use: required texts, numbers, other texts.
local WORDS = {'tenant', 'model', 'lane', 'stream', 'entry', 'owner', 'hash'}
local NUMBERS = {
  'epoch', 'attempt', 'releases', 'lapses', 'crashes', 'next', 'tokens', 'cost', 'prompt_tokens',
  'max_tokens', 'max_attempts', 'deadline', 'ttl_ms', 'metered', 'charged',
  'callback_every', 'created', 'start', 'choices', 'fixed', 'grown', 'token_bytes', 'log_bytes', 'priority',
  'cached',
}
local JOB_FIELDS = {
  'state', 'has_objects', 'callback_to', 'callback_started', 'claimed', 'predicted', 'part', 'arm',
  'passing', 'batch_price', 'cached_price', 'runs', 'steered', 'channel',
}
for i = 1, #WORDS do JOB_FIELDS[#JOB_FIELDS + 1] = WORDS[i] end
for i = 1, #NUMBERS do JOB_FIELDS[#JOB_FIELDS + 1] = NUMBERS[i] end

-- Filled by the files of these names: `_ab.lua`, …
local ab, admission, fairness, filters, later, ledger = {}, {}, {}, {}, {}, {}
local memory, operations, outbox, pauses, pools = {}, {}, {}, {}, {}
local promises, queue, residence, running, totals = {}, {}, {}, {}, {}

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The text as a whole number; nil where it is none, infinite or NaN.
local function whole_number(text)
  local number = tonumber(text)
  if number and number >= -2 ^ 53 and number <= 2 ^ 53 then return math.floor(number) end
end

-- The key of what a lane of a model has.
local function lane_key(tag, kind, model, lane)
  return tag .. ':' .. kind .. ':' .. model .. ':' .. lane
end

-- The fields of a hash as numbers; 0 for missing fields.
local function numbers(key, names)
  local found = {}
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    found[names[i]] = tonumber(value or 0) or 0
  end
  return found
end

-- Adds to fields of a hash: {field, number, …}. Two commands, however many fields. Returns the sums.
local function add_to(key, gains)
  local fields, sums = {}, {}
  for i = 1, #gains, 2 do table.insert(fields, gains[i]) end
  for i, value in ipairs(redis.call('HMGET', key, unpack(fields))) do
    sums[i] = (whole_number(value or 0) or 0) + gains[2 * i]
    gains[2 * i] = string.format('%.0f', sums[i])
  end
  redis.call('HSET', key, unpack(gains))
  return sums
end

-- The mutable part of a job's record; nil where there is none or a required field is missing or
-- malformed. `packed`: the job's value in its worker's hash (_running.lua) where the caller has read
-- it, false where the hash lacks the job.
local function load_job(tag, id, packed)
  local key = tag .. ':job:' .. id
  local values = redis.call('HMGET', key, unpack(JOB_FIELDS))
  if not OPEN[values[1]] and not TERMINAL[values[1]] then return nil end
  local job = {id = id, key = key}
  for i, name in ipairs(JOB_FIELDS) do job[name] = values[i] end
  for _, name in ipairs(WORDS) do
    if not job[name] then return nil end
  end
  if not string.find(job.stream, '^q:') and not string.find(job.stream, '^back:') then return nil end
  if not string.find(job.entry, '^%d+%-%d+$') or #job.entry > 30 then return nil end
  for _, name in ipairs(NUMBERS) do job[name] = whole_number(job[name]) or 0 end
  job.has_objects = job.has_objects == '1'
  local progress = running.progress(tag, job.owner, id, packed)
  for name, value in pairs(progress or {}) do job[name] = value end
  return job
end

-- Whether a job is a flow's, which computes nothing: its calls are jobs of their own.
local function is_flow(job)
  return job.part == 'parent' or job.part == 'nested'
end

-- A job's record for its caller: {field, value, …}.
local function view(tag, id)
  local key, record = tag .. ':job:' .. id, {}
  local values = redis.call('HMGET', key, unpack(VIEW_FIELDS))
  local progress = running.progress(tag, redis.call('HGET', key, 'owner'), id) or {}
  for i, name in ipairs(VIEW_FIELDS) do
    table.insert(record, name)
    table.insert(record, progress[name] and string.format('%d', progress[name]) or values[i] or '')
  end
  return record
end

-- Appends one event to a job's log and publishes it; returns the log's new hash and the bytes that it
-- grew by. The caller must store both and the next event's number. `number` may be text. `channel`: of
-- several jobs; '' or false: the job's own. `news`: what `publish` will send of each channel; nil: at once.
local function write_event(tag, id, number, hash, event, channel, news)
  hash = string.sub(server().sha1hex(hash .. event), 1, 8)
  local logged = number .. ' ' .. hash .. ' ' .. event
  redis.call('XADD', tag .. ':log:' .. id, number, 's', logged)
  if not channel or channel == '' then channel = id end
  local message = id .. ' ' .. #logged .. '\n' .. logged
  if not news then
    redis.call('PUBLISH', tag .. ':ev:' .. channel, message)
  elseif news[channel] then
    table.insert(news[channel], message)
  else
    news[channel] = {message}
  end
  return hash, memory.of_event(logged)
end

local function publish(tag, news)
  for channel, messages in pairs(news) do
    redis.call('PUBLISH', tag .. ':ev:' .. channel, table.concat(messages))
  end
end

-- What the reply of `claim` says of a job.
local function claim_reply(tag, job, now)
  return {job.id, job.epoch, job.attempt, job.next, job.hash, job.tokens, job.deadline - now,
    job.crashes + job.lapses > 0 and string.find(job.stream, ':suspect$') and 1 or 0, job.cost,
    redis.call('HGET', job.key, 'job')}
end

-- Adds a job's entry to a queue stream.
local function add_entry(key, job)
  local fields = {'*', 'id', job.id, 'cost', job.cost, 'lane', job.lane, 'tenant', job.tenant}
  local entry = redis.call('XADD', key, 'NOMKSTREAM', unpack(fields))
  if entry then return entry end
  redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
  return redis.call('XADD', key, unpack(fields))
end

-- The stream in which a tenant's jobs of a lane and an arm (_ab.lua) wait.
local function tenant_stream(job)
  return 'q:' .. job.model .. ':' .. job.lane .. ':' .. job.tenant .. ab.stream_end(job.arm)
end

-- Appends a job to a queue stream: its tenant's, `back:<model>:<lane>`, `q:<model>:suspect` or
-- `q:<model>:later`; sets also the fields `record`, {field, value, …}.
local function enqueue(tag, job, stream, record)
  job.stream = stream
  job.entry = add_entry(tag .. ':' .. stream, job)
  job.state = 'queued'
  job.owner = ''
  record = record or {}
  local turn_jobs, turn_tokens = ledger.count_queued(tag, job, 1)
  for _, word in ipairs({'state', 'queued', 'owner', '', 'stream', stream, 'entry', job.entry,
    turn_jobs and 'turn_jobs', turn_jobs, turn_jobs and 'turn_tokens', turn_tokens}) do
    table.insert(record, word)
  end
  redis.call('HSET', job.key, unpack(record))
  redis.call('PUBLISH', tag .. ':wake:' .. job.model, job.lane)
end

-- Removes a job from its stream and ends its lease and its ownership.
local function dequeue(tag, job)
  running.write_back(tag, job)
  local key = tag .. ':' .. job.stream
  redis.call('XACK', key, GROUP, job.entry)
  redis.call('XDEL', key, job.entry)
  if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
  redis.call('ZREM', tag .. ':leases', job.id)
  if job.owner ~= '' then redis.call('SREM', tag .. ':own:' .. job.owner, job.id) end
  if job.crashes + job.lapses > 0 then
    redis.call('SREM', tag .. ':alone:' .. job.model, job.id)
  end
  if job.state == 'queued' then ledger.count_queued(tag, job, -1) else ledger.count_running(tag, job, -1) end
end

-- A job's entry in `kept`: what `sweep` needs to forget it after its record has expired.
local function kept_entry(job)
  return job.id .. ' ' .. (job.has_objects and '1' or '0') .. ' ' .. job.tenant
end

-- Forgets a job that has ended; its objects in the object store become orphaned.
local function forget(tag, id, tenant, has_objects, entry)
  redis.call('UNLINK', tag .. ':job:' .. id, tag .. ':log:' .. id)  -- not here: a log may be long
  for _, name in ipairs({tenant, ''}) do redis.call('ZREM', tag .. ':jobs:' .. name, id) end
  redis.call('ZREM', tag .. ':chats:' .. tenant, id)
  redis.call('ZREM', tag .. ':kept', entry)
  ledger.unstore(tag, id)
  if has_objects then redis.call('SADD', tag .. ':orphaned', id) end
end

-- Forgets a job whose record load_job cannot read.
local function forget_unreadable(tag, id)
  local record = redis.call('HMGET', tag .. ':job:' .. id, 'tenant', 'has_objects')
  forget(tag, id, record[1] or '', record[2] == '1', '')
end

-- Ends a job: appends the terminal event, settles the cost, and updates record, queue, counters,
-- callback and expiry. `result` (msgpack ObjectRef, '': none) names the object that holds the log before
-- the end, which is then deleted here. `job.all_prompt_tokens`: of all calls of a flow; nil: its own.
local function terminal(tag, job, status, code, message, now, result)
  local own_prompt_tokens = job.prompt_tokens
  job.prompt_tokens = job.all_prompt_tokens or own_prompt_tokens
  local bytes
  job.hash, bytes = write_event(tag, job.id, job.next, job.hash,
    cmsgpack.pack({'end', status, code, message, job.prompt_tokens, job.tokens, job.cached}), job.channel,
    job.news)
  job.next = job.next + 1
  local log_bytes = job.log_bytes + bytes
  if result and result ~= '' then
    redis.call('XTRIM', tag .. ':log:' .. job.id, 'MINID', (job.next - 1) .. '-0')
    redis.call('HSET', job.key, 'result', result, 'has_objects', '1')
    job.has_objects = true
    log_bytes = 0  -- of one event: in the record's bytes
  end
  ledger.hold(tag, job, job.fixed + log_bytes + #message)
  if job.passing == '1' then
    redis.call('ZADD', tag .. ':stored:passing:' .. job.lane, now, job.id)
  end
  local charge = ledger.settle(tag, job, status, now)
  totals.ended(tag, job, status, now)
  ab.ended(tag, job, status, now)
  job.prompt_tokens = own_prompt_tokens  -- as the counters have it
  dequeue(tag, job)
  job.prompt_tokens = job.all_prompt_tokens or own_prompt_tokens
  redis.call('ZREM', tag .. ':deadlines', job.id)
  redis.call('ZREM', tag .. ':attended', job.id)
  redis.call('HSET', job.key, 'state', status, 'code', code, 'message', message,
    'finished', now, 'owner', '', 'next', job.next, 'hash', job.hash,
    'prompt_tokens', job.prompt_tokens, 'charge', charge, 'refund', job.cost - charge)
  redis.call('PEXPIRE', job.key, job.ttl_ms)
  redis.call('PEXPIRE', tag .. ':log:' .. job.id, job.ttl_ms)
  redis.call('ZADD', tag .. ':kept', now + job.ttl_ms, kept_entry(job))
  job.state = status
  outbox.post(tag, job, status, now, code, message)
end

-- Ends a job and notifies its worker.
local function terminate(tag, job, status, now)
  local owner = job.owner
  terminal(tag, job, status, '', '', now)
  if owner ~= '' then
    redis.call('PUBLISH', tag .. ':ctl:' .. owner, 'ended ' .. job.id .. ' ' .. status)
  end
end

-- Returns a running job to the front of its lane, or to the suspects, which run alone.
local function requeue(tag, job, is_suspect)
  dequeue(tag, job)
  enqueue(tag, job,
    is_suspect and 'q:' .. job.model .. ':suspect' or 'back:' .. job.model .. ':' .. job.lane)
end

-- The reason why a worker may not write to a job; nil where it may.
local function fence(job, incarnation, epoch)
  if not job then return 'GONE' end
  if TERMINAL[job.state] then return job.state end
  if job.owner ~= incarnation or job.epoch ~= tonumber(epoch) then return 'FENCED' end
  return nil
end
