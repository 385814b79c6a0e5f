-- append: one step's output of all of a worker's jobs; ends those that are done. Renews leases.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 lease (ms; 0: leases stay as they are)  3 what is said of the jobs, packed
--       4… the id of each
-- packed: ITEM for each job: epoch, output tokens in the event, the event (msgpack, '': none), its
--       number (as text), '' or 'succeeded' or 'failed'.
--       After these an END: error code, error message, where its log is kept from now on (msgpack
--       ObjectRef, '': here)
-- reply {} where all was appended: each job's next event has the number after the one it said.
--       Else, of the others: {place of the job among them, verdict, number, place, verdict, …}
--       'OK', next event number    ended beside its event, or appended before
--       'GAP', next event number   events are missing before this one
--       'OVER', output tokens      more output than the job's cap: not appended
--       'FENCED', 0                the job is another worker's, or waits
--       'GONE', 0                  no such job
--       status, 0                  the job has ended: succeeded, failed, cancelled, expired
-- A call is made for every step of a worker, so it does little for each job: what it must know of
-- those that go on is read and written for all together, and so are leases and counters; an argument
-- of its own for each thing said would cost more than the thing. The first output of a job, its end
-- and whatever is refused go the long way, by the record.
local ITEM = '<I4I4I4c0ss'
local END = '<sI4c0I4c0'
local MOST_ARGUMENTS = 1000  -- of one command
local FIRST_ID = 4  -- argument

-- What the jobs of one place, a lane of a model, have gained in this call: output tokens, and
-- tokens of their cost, all and those of jobs that are in the count (_recount.lua).
local function gains_of(gains_by_lane, model_lane)
  local gains = gains_by_lane[model_lane]
  if not gains then
    gains = {tokens = 0, done = 0, counted = 0}
    gains_by_lane[model_lane] = gains
  end
  return gains
end

-- Appends the event, and writes all that it changes in the record.
local function progress(tag, job, event, num_tokens, now, gains_by_lane)
  local gains, done_before = gains_of(gains_by_lane, running.model_lane(job)), ledger.done(job)
  local is_first = job.tokens == 0 and num_tokens > 0
  job.tokens = job.tokens + num_tokens
  gains.tokens = gains.tokens + num_tokens
  local done = ledger.done(job) - done_before
  gains.done = gains.done + done
  if recount.includes(tag, job.deadline) then gains.counted = gains.counted + done end
  job.hash = write_event(tag, job.id, job.next, job.hash, event)
  job.next = job.next + 1
  local changed = {'state', 'streaming', 'tokens', job.tokens, 'next', job.next, 'hash', job.hash}
  if is_first then
    changed[9], changed[10] = 'first_token', now
    totals.first_output(tag, job, now)
  end
  redis.call('HSET', job.key, unpack(changed))
  running.store(tag, job)
end

-- The long way: a verdict and its number.
local function append_one(tag, now, incarnation, item, gains_by_lane, renewed)
  local job, num_tokens = load_job(tag, item.id, item.packed), item.num_tokens
  local refusal = fence(job, incarnation, item.epoch)
  if refusal then return refusal, 0 end
  if item.number < job.next then return 'OK', job.next end
  if item.number > job.next then return 'GAP', job.next end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return 'expired', 0
  end
  if job.tokens + num_tokens > job.max_tokens then return 'OVER', job.tokens end

  if item.event ~= '' then
    progress(tag, job, item.event, num_tokens, now, gains_by_lane)
    local every = item.fin == '' and job.callback_every or 0
    if every > 0 and job.tokens % every < num_tokens then
      outbox.post(tag, job, 'progress', now, '', '')
    end
  end
  if item.fin == '' then
    table.insert(renewed, item.id)
  else
    terminal(tag, job, item.fin, item.code, item.message, now, item.result)
  end
  return 'OK', job.next
end

-- The short way, for a job that goes on with output: how far it is now, packed; nil where it must go
-- the long one.
local function append_running(tag, now, packed, id, epoch, number, event, num_tokens, gains_by_lane, recount_position)
  local known_epoch, next_number, tokens, hash, deadline, max_tokens, remaining, model_lane =
    running.unpack(packed)
  if epoch ~= known_epoch or tonumber(number) ~= next_number then return nil end
  tokens = tokens + num_tokens
  if now >= deadline or tokens > max_tokens then return nil end
  hash = write_event(tag, id, number, hash, event)
  local gains, done = gains_by_lane[model_lane] or gains_of(gains_by_lane, model_lane), num_tokens
  if done > remaining then done = remaining end
  gains.tokens = gains.tokens + num_tokens
  gains.done = gains.done + done
  if deadline <= recount_position then gains.counted = gains.counted + done end
  return running.pack(epoch, next_number + 1, tokens, hash, deadline, max_tokens, remaining - done,
    model_lane)
end

-- How far those of the call's jobs are that go on, packed, by id; false of others.
local function load_running(tag, incarnation, argv)
  local running_jobs = {}
  for first = FIRST_ID, #argv, MOST_ARGUMENTS do
    local last = math.min(#argv, first + MOST_ARGUMENTS - 1)
    local values = redis.call('HMGET', running.key(tag, incarnation), unpack(argv, first, last))
    for i, value in ipairs(values) do running_jobs[argv[first + i - 1]] = value end
  end
  return running_jobs
end

-- Gives a command its arguments, as many at a time as it may have.
local function write(name, key, arguments)
  for first = 1, #arguments, MOST_ARGUMENTS do
    local last = math.min(#arguments, first + MOST_ARGUMENTS - 1)
    redis.call(name, key, unpack(arguments, first, last))
  end
end

local function renew(tag, lapses, ids)
  local leases = {}
  for i, id in ipairs(ids) do leases[2 * i - 1], leases[2 * i] = lapses, id end
  write('ZADD', tag .. ':leases', leases)
end

-- Adds what was gained to its lanes' counters.
local function count(tag, gains_by_lane)
  for model_lane, gains in pairs(gains_by_lane) do
    local lane, model = string.match(model_lane, '^(%S+) +(.*)$')
    if gains.tokens > 0 then
      totals.add(tag, model, 'generation_tokens_total:' .. lane, gains.tokens)
    end
    ledger.progress(tag, {model = model, lane = lane}, gains.done)
    if gains.counted > 0 then
      recount.add(tag, {'counters:' .. model .. ':' .. lane .. ' done_tokens', gains.counted}, 1)
    end
  end
end

local function append(keys, argv)
  local tag, now = keys[1], now_ms()
  local incarnation, lease_ms = argv[1], tonumber(argv[2])
  local exceptions, gains_by_lane, renewed = {}, {}, {}  -- said: gains by place
  local recount_position = recount.position(tag)
  local running_jobs, advanced, num_advanced = load_running(tag, incarnation, argv), {}, 0
  local packed_items, from, unpack_struct = argv[3], 1, struct.unpack
  for i = FIRST_ID, #argv do
    local id = argv[i]
    local epoch, num_tokens, event, number, fin, after = unpack_struct(ITEM, packed_items, from)
    from = after
    local stored = running_jobs[id]
    local packed = stored
    running_jobs[id] = nil  -- a second event of a job in one call goes the long way
    if packed and event ~= '' and fin == '' then
      packed = append_running(tag, now, packed, id, epoch, number, event, num_tokens, gains_by_lane, recount_position)
    else
      packed = nil
    end
    if packed then
      advanced[num_advanced + 1] = id
      advanced[num_advanced + 2] = packed
      num_advanced = num_advanced + 2
      renewed[#renewed + 1] = id
    else
      write('HSET', running.key(tag, incarnation), advanced)
      advanced, num_advanced = {}, 0
      local item = {id = id, epoch = epoch, number = tonumber(number), event = event,
        num_tokens = num_tokens, fin = fin, packed = stored}
      if fin ~= '' then
        item.code, item.message, item.result, from = struct.unpack(END, packed_items, from)
      end
      local verdict, verdict_number = append_one(tag, now, incarnation, item, gains_by_lane, renewed)
      if verdict ~= 'OK' or verdict_number ~= item.number + 1 then
        table.insert(exceptions, i - FIRST_ID + 1)
        table.insert(exceptions, verdict)
        table.insert(exceptions, verdict_number)
      end
    end
  end
  write('HSET', running.key(tag, incarnation), advanced)
  if lease_ms > 0 then renew(tag, now + lease_ms, renewed) end
  count(tag, gains_by_lane)
  return exceptions
end

register('append', append, 'allow-oom')
