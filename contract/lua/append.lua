-- append: one step's output of all of a worker's jobs; ends those that are done. Renews leases.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 lease (ms)  then 9 for each job:
--       id, epoch, event number, event (msgpack, '': none), output tokens in it,
--       '' | 'succeeded' | 'failed', error code, error message, where its log is kept from its end
--       on (msgpack ObjectRef, '': here)
-- reply one verdict for each job, in order:
--       {'OK', next event number}  appended, or appended before
--       {'GAP', next event number} events are missing before this one
--       {'OVER', output tokens}    more output than the job's cap: not appended
--       {'FENCED'}                 the job is another worker's, or waits
--       {'GONE'}                   no such job
--       {status}                   the job has ended: succeeded, failed, cancelled, expired
-- A call is made for every step of a worker, so it does little for each job: of the record it reads
-- what follows, and writes once; leases and counters are written for all jobs together.
local FIELDS = {
  'state', 'owner', 'hash', 'model', 'lane', 'first_token', 'epoch', 'next', 'tokens', 'deadline',
  'max_tokens', 'cost', 'prompt_tokens', 'callback_every',
}
local FIRST_NUMBER = 7  -- of FIELDS; those from here on are numbers
local MOST_ARGUMENTS = 1000  -- of one command

local function load_part(tag, id)
  local key = tag .. ':job:' .. id
  local values = redis.call('HMGET', key, unpack(FIELDS))
  if not values[1] then return nil end
  local job = {id = id, key = key}
  for i = 1, FIRST_NUMBER - 1 do job[FIELDS[i]] = values[i] end
  for i = FIRST_NUMBER, #FIELDS do job[FIELDS[i]] = tonumber(values[i]) or 0 end
  return job
end

-- What the jobs of one lane have gained in this call: output tokens, and tokens of their cost.
local function gains_of(said, job)
  local model = said[job.model] or {}
  said[job.model] = model
  model[job.lane] = model[job.lane] or {tokens = 0, done = 0}
  return model[job.lane]
end

-- Appends the event, and writes all that it changes in the record.
local function progress(tag, job, event, num_tokens, now, said)
  local gains, done = gains_of(said, job), ledger.done(job)
  job.tokens = job.tokens + num_tokens
  gains.tokens = gains.tokens + num_tokens
  gains.done = gains.done + ledger.done(job) - done
  write_event(tag, job, event)
  if num_tokens > 0 and not job.first_token then
    redis.call('HSET', job.key, 'state', 'streaming', 'tokens', job.tokens, 'next', job.next,
      'hash', job.hash, 'first_token', now)
    totals.began(tag, job, now)
  else
    redis.call('HSET', job.key, 'state', 'streaming', 'tokens', job.tokens, 'next', job.next,
      'hash', job.hash)
  end
end

local function append_one(tag, now, incarnation, id, epoch, number, event, num_tokens,
                          fin, code, message, result, said, renewed)
  local job = load_part(tag, id)
  local refusal = fence(job, incarnation, epoch)
  if refusal then return {refusal} end
  if number < job.next then return {'OK', job.next} end
  if number > job.next then return {'GAP', job.next} end
  if now >= job.deadline then
    terminal(tag, load_job(tag, id), 'expired', '', '', now)
    return {'expired'}
  end
  if job.tokens + num_tokens > job.max_tokens then return {'OVER', job.tokens} end

  if event ~= '' then
    progress(tag, job, event, num_tokens, now, said)
    local every = fin == '' and job.callback_every or 0
    if every > 0 and job.tokens % every < num_tokens then
      outbox.post(tag, load_job(tag, id), 'progress', now, '', '')
    end
  end
  if fin == '' then
    table.insert(renewed, id)
    return {'OK', job.next}
  end
  job = load_job(tag, id)
  terminal(tag, job, fin, code, message, now, result)
  return {'OK', job.next}
end

local function renew(tag, ids, lapses)
  for first = 1, #ids, MOST_ARGUMENTS / 2 do
    local arguments = {}
    for i = first, math.min(#ids, first + MOST_ARGUMENTS / 2 - 1) do
      table.insert(arguments, lapses)
      table.insert(arguments, ids[i])
    end
    redis.call('ZADD', tag .. ':leases', unpack(arguments))
  end
end

local function append(keys, argv)
  local tag, now = keys[1], now_ms(keys[1])
  local incarnation, lease_ms = argv[1], tonumber(argv[2])
  local verdicts, said, renewed = {}, {}, {}  -- said: gains by model and lane
  for i = 3, #argv, 9 do
    table.insert(verdicts, append_one(tag, now, incarnation, argv[i], argv[i + 1],
      tonumber(argv[i + 2]), argv[i + 3], tonumber(argv[i + 4]), argv[i + 5], argv[i + 6],
      argv[i + 7], argv[i + 8], said, renewed))
  end
  renew(tag, renewed, now + lease_ms)
  for model, lanes in pairs(said) do
    for lane, gains in pairs(lanes) do
      if gains.tokens > 0 then
        totals.add(tag, model, 'generation_tokens_total:' .. lane, gains.tokens)
      end
      ledger.progress(tag, {model = model, lane = lane}, gains.done)
    end
  end
  return verdicts
end
redis.register_function{
  function_name = 'batchway_v1_append', callback = append, flags = {'allow-oom'},
}
