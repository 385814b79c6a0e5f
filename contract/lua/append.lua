-- append: appends one step's output of all of a worker's jobs, ends finished jobs, renews leases.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 lease (ms; 0: leases stay as they are)  3 items, packed
--       4… job ids, 1,000 at most
-- items  for each job an ITEM: epoch, output tokens in the event, the event (msgpack, '': none), its
--       number (as text), '' or 'succeeded' or 'failed'. The latter two are followed by an END: error
--       code, error message, the object that holds the log before the end (msgpack ObjectRef, '': none),
--       the prompt tokens of all calls of a flow (0: of the job's own prompt). 'marked' in their place
--       is followed by MARKED: lines of what the engine did with the job, and one of these three. Before these,
--       and in this order: 'held', by as much: marks of what the worker keeps of the job (_residence.lua);
--       'found', by FOUND: tokens of the prompt that the event's output found in the cache (with a flow's end:
--       of all its calls).
--       A line is `<kind> <begun> <ended> <times> <tokens>`, in ms ago
-- reply {job's index from 1, verdict, number, index, verdict, …} for the jobs whose event was not
--       simply appended under its number
--       'OK', next event number    also ended, or appended before
--       'GAP', next event number   events before this one are missing
--       'OVER', output tokens      over the job's output cap, which a flow's job has not: not appended
--       'FENCED', 0                another worker holds the job, or it waits
--       'GONE', 0                  no such job
--       status, 0                  the job has ended: succeeded, failed, cancelled, expired
--       'LATER', 0                 MAX_SLOW jobs were handled by their records: this and all jobs behind it
--                                  are to be appended by another call
-- A worker calls it at every step. Progress, leases and counters of jobs that continue are read and
-- written in one command for all jobs; packed arguments cost less than one argument per value. A job's
-- first output, its end and refusals use the job's record (append_one).
local ITEM = '<I4I4I4c0ss'
local MARKED = '<I4c0s'
local FOUND = '<I4s'
local END = '<sI4c0I4c0I4'
local MAX_SLOW = 8
local FIRST_ID = 4  -- argument

-- What one lane of a model gains in this call: output tokens, and computed tokens of the jobs' costs.
local function gains_of(gains_by_lane, model_lane)
  local gains = gains_by_lane[model_lane]
  if not gains then
    gains = {tokens = 0, done = 0}
    gains_by_lane[model_lane] = gains
  end
  return gains
end

-- Appends an event and updates the job's record.
local function progress(tag, job, event, num_tokens, now, gains_by_lane, continues)
  local gains, done_before = gains_of(gains_by_lane, running.model_lane(job)), ledger.done(job)
  local is_first = job.tokens == 0 and num_tokens > 0
  job.tokens = job.tokens + num_tokens
  ledger.grow(tag, job, now)
  gains.tokens = gains.tokens + num_tokens
  gains.done = gains.done + ledger.done(job) - done_before
  local bytes
  job.hash, bytes = write_event(tag, job.id, job.next, job.hash, event, job.channel, job.news)
  job.next, job.log_bytes = job.next + 1, job.log_bytes + bytes
  local changed = {'state', 'streaming', 'tokens', job.tokens, 'next', job.next, 'hash', job.hash,
    'log_bytes', job.log_bytes}
  if is_first then
    changed[11], changed[12] = 'first_token', now
    totals.first_output(tag, job, now)
    residence.note_prompt(tag, job, now)
  end
  redis.call('HSET', job.key, unpack(changed))
  if continues then running.store(tag, job) end
end

-- Adds marks to the job's runs, behind the claim of the worker that tells of them, while there is room.
local function mark(job, lines, now)
  local told = string.gsub(lines, '(%a+) (%d+) (%d+) (%d+ %d+)\n', function(kind, begun, ended, rest)
    return string.format('%s %.0f %.0f %s\n', kind, now - begun, now - ended, rest)
  end)
  told = (job.runs or '') .. told
  if #told <= MAX_RUNS_BYTES then redis.call('HSET', job.key, 'runs', told) end
end

-- Notes what was found in the cache, of one prompt or of all of a flow's calls.
local function note_cached(tag, job, num_cached)
  job.cached = job.cached + num_cached
  redis.call('HSET', job.key, 'cached', job.cached)
  if not is_flow(job) then
    totals.add(tag, job.model, 'prompt_tokens_cached_total:' .. job.lane, num_cached)
  end
end

-- Handles one item by the job's record: a verdict and its number.
local function append_one(tag, now, incarnation, item, gains_by_lane, renewed, news)
  local job, num_tokens = load_job(tag, item.id, item.packed), item.num_tokens
  local refusal = fence(job, incarnation, item.epoch)
  if refusal then return refusal, 0 end
  job.news = news
  if item.number < job.next then return 'OK', job.next end
  if item.number > job.next then return 'GAP', job.next end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return 'expired', 0
  end
  if job.tokens + num_tokens > job.max_tokens and not is_flow(job) then return 'OVER', job.tokens end

  if item.marks then mark(job, item.marks, now) end
  if (item.cached or 0) > 0 then note_cached(tag, job, item.cached) end
  if item.event ~= '' then
    progress(tag, job, item.event, num_tokens, now, gains_by_lane, item.fin == '')
    local every = item.fin == '' and job.callback_every or 0
    if every > 0 and job.tokens % every < num_tokens then
      outbox.post(tag, job, 'progress', now, '', '')
    end
  end
  if item.fin == '' then
    table.insert(renewed, item.id)
  else
    if item.held then residence.note_answer(tag, job, item.held, now) end
    if item.prompt_tokens > 0 then job.all_prompt_tokens = item.prompt_tokens end
    terminal(tag, job, item.fin, item.code, item.message, now, item.result)
  end
  return 'OK', job.next
end

-- Appends output of a job that continues within its cost, without its record: the new packed progress,
-- or nil where append_one must handle the item.
local function append_running(tag, now, packed, id, epoch, number, event, num_tokens, gains_by_lane, news)
  local known_epoch, next_number, tokens, log_bytes, hash, deadline, max_tokens, remaining, model_lane,
    channel = running.unpack(packed)
  if epoch ~= known_epoch or tonumber(number) ~= next_number then return nil end
  tokens = tokens + num_tokens
  if now >= deadline or tokens > max_tokens or num_tokens > remaining then return nil end
  local bytes
  hash, bytes = write_event(tag, id, number, hash, event, channel, news)
  local gains = gains_by_lane[model_lane] or gains_of(gains_by_lane, model_lane)
  gains.tokens = gains.tokens + num_tokens
  gains.done = gains.done + num_tokens
  return running.pack(epoch, next_number + 1, tokens, log_bytes + bytes, hash, deadline, max_tokens,
    remaining - num_tokens, model_lane, channel)
end

-- Packed progress of the call's jobs by id; false for jobs without.
local function load_running(tag, incarnation, argv)
  local running_jobs = {}
  local values = redis.call('HMGET', running.key(tag, incarnation), unpack(argv, FIRST_ID))
  for i, value in ipairs(values) do running_jobs[argv[FIRST_ID + i - 1]] = value end
  return running_jobs
end

local function write(name, key, arguments)
  if #arguments > 0 then redis.call(name, key, unpack(arguments)) end
end

local function renew(tag, lapses, ids)
  local leases = {}
  for i, id in ipairs(ids) do leases[2 * i - 1], leases[2 * i] = lapses, id end
  write('ZADD', tag .. ':leases', leases)
end

-- Adds the gains to the lanes' counters.
local function count(tag, gains_by_lane)
  for model_lane, gains in pairs(gains_by_lane) do
    local lane, model = string.match(model_lane, '^(%S+) +(.*)$')
    if gains.tokens > 0 then
      totals.add(tag, model, 'generation_tokens_total:' .. lane, gains.tokens)
    end
    ledger.progress(tag, {model = model, lane = lane}, gains.done)
  end
end

local function append(keys, argv)
  local tag, now = keys[1], now_ms()
  local incarnation, lease_ms = argv[1], tonumber(argv[2])
  local exceptions, gains_by_lane, renewed, news, num_slow = {}, {}, {}, {}, 0
  local running_jobs, advanced, num_advanced = load_running(tag, incarnation, argv), {}, 0
  local packed_items, from, unpack_struct = argv[3], 1, struct.unpack
  for i = FIRST_ID, #argv do
    local id = argv[i]
    local epoch, num_tokens, event, number, fin, after = unpack_struct(ITEM, packed_items, from)
    from = after
    local stored = running_jobs[id]
    local packed = stored
    running_jobs[id] = nil  -- append_one handles a second event of a job
    if packed and event ~= '' and fin == '' then
      packed = append_running(tag, now, packed, id, epoch, number, event, num_tokens,
        gains_by_lane, news)
    else
      packed = nil
    end
    if packed then
      advanced[num_advanced + 1] = id
      advanced[num_advanced + 2] = packed
      num_advanced = num_advanced + 2
      renewed[#renewed + 1] = id
    elseif num_slow == MAX_SLOW then
      for _, word in ipairs({i - FIRST_ID + 1, 'LATER', 0}) do table.insert(exceptions, word) end
      break
    else
      num_slow = num_slow + 1
      write('HSET', running.key(tag, incarnation), advanced)
      advanced, num_advanced = {}, 0
      local item = {id = id, epoch = epoch, number = tonumber(number), event = event,
        num_tokens = num_tokens, fin = fin, packed = stored}
      if item.fin == 'held' then
        item.held, item.fin, from = struct.unpack(MARKED, packed_items, from)
      end
      if item.fin == 'found' then
        item.cached, item.fin, from = struct.unpack(FOUND, packed_items, from)
      end
      if item.fin == 'marked' then
        item.marks, item.fin, from = struct.unpack(MARKED, packed_items, from)
      end
      if item.fin ~= '' then
        item.code, item.message, item.result, item.prompt_tokens, from =
          struct.unpack(END, packed_items, from)
      end
      local verdict, verdict_number = append_one(tag, now, incarnation, item, gains_by_lane, renewed,
        news)
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
  publish(tag, news)
  return exceptions
end

register('append', append, 'allow-oom')
