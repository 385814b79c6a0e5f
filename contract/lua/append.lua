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
-- A call is made for every step of a worker, so it does little for each job: what it must know of
-- those that go on is read and written for all together, and so are leases and counters. The first
-- output of a job, its end and whatever is refused go the long way, by the record.
local MOST_ARGUMENTS = 1000  -- of one command
local NUM_OF_JOB = 9  -- arguments

-- What the jobs of one lane have gained in this call: output tokens, and tokens of their cost.
local function gains_of(said, model, lane)
  local lanes = said[model] or {}
  said[model] = lanes
  lanes[lane] = lanes[lane] or {tokens = 0, done = 0}
  return lanes[lane]
end

-- Appends the event, and writes all that it changes in the record.
local function progress(tag, job, event, num_tokens, now, said)
  local gains, done = gains_of(said, job.model, job.lane), ledger.done(job)
  job.tokens = job.tokens + num_tokens
  gains.tokens = gains.tokens + num_tokens
  gains.done = gains.done + ledger.done(job) - done
  job.hash = write_event(tag, job.id, job.next, job.hash, event)
  job.next = job.next + 1
  redis.call('HSET', job.key, 'state', 'streaming', 'tokens', job.tokens, 'next', job.next, 'hash',
    job.hash)
  if num_tokens > 0 and redis.call('HSETNX', job.key, 'first_token', now) == 1 then
    totals.began(tag, job, now)
  end
  running.note(tag, job)
end

local function append_one(tag, now, incarnation, id, epoch, number, event, num_tokens,
                          fin, code, message, result, said, renewed)
  local job = load_job(tag, id)
  local refusal = fence(job, incarnation, epoch)
  if refusal then return {refusal} end
  if number < job.next then return {'OK', job.next} end
  if number > job.next then return {'GAP', job.next} end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return {'expired'}
  end
  if job.tokens + num_tokens > job.max_tokens then return {'OVER', job.tokens} end

  if event ~= '' then
    progress(tag, job, event, num_tokens, now, said)
    local every = fin == '' and job.callback_every or 0
    if every > 0 and job.tokens % every < num_tokens then
      outbox.post(tag, job, 'progress', now, '', '')
    end
  end
  if fin == '' then
    table.insert(renewed, id)
  else
    terminal(tag, job, fin, code, message, now, result)
  end
  return {'OK', job.next}
end

-- The short way, for a job that goes on with output: the number of its next event, and how far it
-- is now, packed; nil where it must go the long one.
local function go_on(tag, now, packed, id, epoch, number, event, num_tokens, said)
  local its_epoch, next_number, tokens, hash, deadline, max_tokens, cost, prompt_tokens, model,
    lane = running.unpack(packed)
  local all_tokens = tokens + num_tokens
  if tonumber(epoch) ~= its_epoch or tonumber(number) ~= next_number then return nil end
  if now >= deadline or all_tokens > max_tokens then return nil end
  hash = write_event(tag, id, number, hash, event)
  local gains = gains_of(said, model, lane)
  gains.tokens = gains.tokens + num_tokens
  gains.done = gains.done + math.min(cost, prompt_tokens + all_tokens)
    - math.min(cost, prompt_tokens + tokens)
  return next_number + 1, running.pack(its_epoch, next_number + 1, all_tokens, hash, deadline,
    max_tokens, cost, prompt_tokens, model, lane)
end

-- How far those of the call's jobs are that go on, packed, by id.
local function those_running(tag, incarnation, argv)
  local found = {}
  for first = 3, #argv, NUM_OF_JOB * MOST_ARGUMENTS do
    local ids = {}
    for i = first, math.min(#argv, first + NUM_OF_JOB * MOST_ARGUMENTS - 1), NUM_OF_JOB do
      table.insert(ids, argv[i])
    end
    local values = redis.call('HMGET', running.key(tag, incarnation), unpack(ids))
    for i, id in ipairs(ids) do found[id] = values[i] or nil end
  end
  return found
end

-- Gives a command its arguments, as many at a time as it may have.
local function write(name, key, arguments)
  for first = 1, #arguments, MOST_ARGUMENTS do
    local last = math.min(#arguments, first + MOST_ARGUMENTS - 1)
    redis.call(name, key, unpack(arguments, first, last))
  end
end

local function append(keys, argv)
  local tag, now = keys[1], now_ms(keys[1])
  local incarnation, lapses = argv[1], now + tonumber(argv[2])
  local verdicts, said, renewed = {}, {}, {}  -- said: gains by model and lane
  local found, gone_on = those_running(tag, incarnation, argv), {}
  for i = 3, #argv, NUM_OF_JOB do
    local id, event = argv[i], argv[i + 3]
    local packed = found[id]
    found[id] = nil  -- a second event of a job in one call goes the long way
    local next_number
    if packed and event ~= '' and argv[i + 5] == '' then
      next_number, packed = go_on(tag, now, packed, id, argv[i + 1], argv[i + 2], event,
        tonumber(argv[i + 4]), said)
    end
    if next_number then
      table.insert(gone_on, id)
      table.insert(gone_on, packed)
      table.insert(renewed, id)
      table.insert(verdicts, {'OK', next_number})
    else
      write('HSET', running.key(tag, incarnation), gone_on)
      gone_on = {}
      table.insert(verdicts, append_one(tag, now, incarnation, id, argv[i + 1],
        tonumber(argv[i + 2]), event, tonumber(argv[i + 4]), argv[i + 5], argv[i + 6],
        argv[i + 7], argv[i + 8], said, renewed))
    end
  end
  write('HSET', running.key(tag, incarnation), gone_on)
  local leases = {}
  for _, id in ipairs(renewed) do
    table.insert(leases, lapses)
    table.insert(leases, id)
  end
  write('ZADD', tag .. ':leases', leases)
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
