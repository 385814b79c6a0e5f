-- Hints where content lies: claims prefer the workers that hold a job's prefix or its session. A content is
-- known by a mark of MARK bytes (contract/residence.py). The hashes `at:<model>` and `at:<model> other` have
-- for each mark the workers that hold it, the last one first; they take turns. A job's record has in `marks`
-- the mark of its session (NONE: it has none), then those of the prefixes of its prompt.
-- A hint may be wrong: then a job has waited in vain, for a time that is bounded.
-- requires shared, pools

local MARK = 8
local NONE = '\0\0\0\0\0\0\0\0'
local FIRST, PER_DOUBLING = 64, 4  -- positions of marks in tokens, as mark_positions has them
local SINCE = 'since'              -- a field that is no mark
local AGE_MS = 5 * 60 * 1000       -- hints live once to twice as long
local MAX_HINTS = 50000            -- in each of the two hashes
local MAX_HOLDERS = 4              -- of a mark
local MIN_LEFT_MS, MAX_LEFT_MS = 20, 2000  -- for which a worker leaves a job to another
local FULLER = 0.5  -- of the places: by so much, times the share found, a holder may be fuller than others
local SESSION_SHARE = 0.5          -- at least, of a job in a session

local function position(number)
  local octave = math.floor((number - 1) / PER_DOUBLING)
  return FIRST * 2 ^ octave * (1 + (number - 1) % PER_DOUBLING / PER_DOUBLING)
end

-- Both hashes, the present one first, and since when (ms) it is that.
local function hints(tag, model)
  local one = tag .. ':at:' .. model
  local other = one .. ' other'
  local since, before = tonumber(redis.call('HGET', one, SINCE)), tonumber(redis.call('HGET', other, SINCE))
  if (before or 0) > (since or 0) then return other, one, before end
  return one, other, since
end

local function split(marks, first)
  local fields = {}
  for i = first, #marks, MARK do table.insert(fields, string.sub(marks, i, i + MARK - 1)) end
  return fields
end

-- Notes that a worker holds contents.
function residence.note(tag, model, incarnation, marks, now)
  local key, other, since = hints(tag, model)
  if since and (now - since >= AGE_MS or redis.call('HLEN', key) >= MAX_HINTS) then
    key, since = other, nil
    redis.call('UNLINK', key)
  end
  local fields, changed = split(marks, 1), {}
  local known = redis.call('HMGET', key, unpack(fields))
  for i, field in ipairs(fields) do
    local holders = {incarnation}
    for holder in string.gmatch(known[i] or '', '%S+') do
      if holder ~= incarnation and #holders < MAX_HOLDERS then table.insert(holders, holder) end
    end
    local value = table.concat(holders, ' ')
    if value ~= known[i] then
      table.insert(changed, field)
      table.insert(changed, value)
    end
  end
  if #changed == 0 then return end
  redis.call('HSET', key, SINCE, since or now, unpack(changed))
  if not since then redis.call('PEXPIRE', key, 2 * AGE_MS) end
end

-- The marks of a prompt that its worker notes: deeper ones than a quarter of it, and the first, without
-- which none is looked for.
local function noted(marks)
  local num = #marks / MARK
  return string.sub(marks, 1, MARK) .. string.sub(marks, MARK * math.max(1, num - 2 * PER_DOUBLING) + 1)
end

-- Notes the prefixes of a job's prompt, or longer ones that its worker has told of.
function residence.note_prefixes(tag, job, marks, now)
  if #marks > 0 then residence.note(tag, job.model, job.owner, noted(marks), now) end
end

-- The live workers of a mark's value.
local function living(tag, model, value, now, look)
  local found = {}
  for holder in string.gmatch(value or '', '%S+') do
    local seen = look and look.seen[holder]
    if seen == nil then
      seen = tonumber(redis.call('ZSCORE', tag .. ':workers:' .. model, holder) or 0) >= now - WORKER_TTL_MS
      if look then look.seen[holder] = seen end
    end
    if seen then table.insert(found, holder) end
  end
  return found[1] and found
end

-- The workers that hold the longest prefix of a prompt, and its length in tokens; nil: none does. `look`: of
-- a claim, remembers who lives.
function residence.find(tag, model, marks, now, look)
  local one, first = tag .. ':at:' .. model, string.sub(marks, MARK + 1, 2 * MARK)
  if first == '' then return nil end
  if not redis.call('HGET', one, first) and not redis.call('HGET', one .. ' other', first) then return nil end
  local present, before = hints(tag, model)
  local fields = split(marks, MARK + 1)
  local values, old = redis.call('HMGET', present, unpack(fields)), nil
  for number = #fields, 1, -1 do
    if not values[number] then
      old = old or redis.call('HMGET', before, unpack(fields))
      values[number] = old[number]
    end
    local holders = living(tag, model, values[number], now, look)
    if holders then return holders, position(number) end
  end
end

-- The workers to prefer for a job: of its session, otherwise of its prefix.
local function preferred(look, marks)
  local session, of_session = string.sub(marks, 1, MARK), nil
  if session ~= NONE then
    local present, before = hints(look.tag, look.model)
    local value = redis.call('HGET', present, session) or redis.call('HGET', before, session)
    of_session = living(look.tag, look.model, value, look.now, look)
  end
  local holders, tokens = residence.find(look.tag, look.model, marks, look.now, look)
  return of_session or holders, tokens or 0, of_session and SESSION_SHARE or 0
end

-- The jobs that a worker has, and its places; nil: it claims none.
local function load_of(look, incarnation)
  local load = look.loads[incarnation]
  if load == nil then
    local worker = redis.call('HMGET', look.tag .. ':worker:' .. incarnation, 'state', POOL[4])
    local places = tonumber(worker[2] or 0) or 0
    load = worker[1] == 'up' and places > 0
      and {num = redis.call('SCARD', look.tag .. ':own:' .. incarnation), places = places}
    look.loads[incarnation] = load
  end
  return load or nil
end

-- What a claim knows of residence. `token_us`: what a token of a prompt takes the worker.
function residence.look(tag, model, incarnation, token_us, now)
  return {tag = tag, model = model, incarnation = incarnation, token_us = token_us, now = now,
    seen = {}, loads = {}, verdicts = {}}
end

local function judged(look, id, marks)
  local holders, tokens, share = preferred(look, marks)
  if not holders then return nil end
  for _, holder in ipairs(holders) do
    if holder == look.incarnation then return 'here' end
  end
  local job = numbers(look.tag .. ':job:' .. id, {'prompt_tokens', 'left', 'deadline'})
  local own = load_of(look, look.incarnation) or {num = 0}
  local fuller = FULLER * math.max(share, tokens / math.max(1, job.prompt_tokens))
  for _, holder in ipairs(holders) do
    local load = load_of(look, holder)
    if load and load.num < load.places and load.num - own.num <= fuller * load.places then
      local left = job.left > 0 and job.left or look.now
      local most = math.min(MAX_LEFT_MS, (job.deadline - left) / 4)
      local again = left + math.min(most, math.max(MIN_LEFT_MS, tokens * look.token_us / 1000))
      if look.now >= again then return 'elsewhere' end
      if job.left == 0 then redis.call('HSET', look.tag .. ':job:' .. id, 'left', look.now) end
      look.again_ms = math.min(look.again_ms or again, again)
      return 'left'
    end
  end
  return 'elsewhere'
end

-- Where a job is to go that this worker may claim: 'here', as it holds its content; 'left', as another
-- does and has room; 'elsewhere', as another does that has none; nil: nobody holds it.
-- A holder has room while it is not much fuller than this worker, by what would be saved. A job is left for
-- as long as its tokens that are found would take here: `look.again_ms` is when it is left no more.
function residence.judge(look, id, marks)
  if look.verdicts[id] == nil then look.verdicts[id] = judged(look, id, marks) or false end
  return look.verdicts[id]
end
