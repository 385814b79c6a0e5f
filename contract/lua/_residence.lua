-- Hints where content lies: claims prefer the workers that hold a job's prefix or its session. A content is
-- known by a mark of MARK bytes (contract/residence.py). The hash `at:<model>` has for each mark the minute of
-- the hint, then the workers that hold it, the last one first. A job's record has in `marks` the mark of its
-- session (NONE: it has none), then those of the prefixes of its prompt.
-- A hint may be wrong: then a job has waited in vain, for a time that is bounded.
-- requires shared, pools

local MARK = 8
local NONE = '\0\0\0\0\0\0\0\0'
local FIRST, PER_DOUBLING = 64, 4  -- positions of marks in tokens, as mark_positions has them
local MINUTE_MS, MAX_MINUTES = 60000, 10  -- for which a hint holds
local MAX_HINTS = 100000           -- of a model; then those that a draw finds give way
local MAX_HOLDERS = 4              -- of a mark
local MAX_JUDGED = 32              -- jobs of a call that are judged: others go to any worker
local MIN_LEFT_MS, MAX_LEFT_MS = 20, 2000  -- for which a worker leaves a job to another
local FULLER = 0.5  -- of the places: by so much, times the share found, a holder may be fuller than others
local SESSION_SHARE = 0.5          -- at least, of a job in a session

local function hints_key(tag, model)
  return tag .. ':at:' .. model
end

local function position(number)
  local octave = math.floor((number - 1) / PER_DOUBLING)
  return FIRST * 2 ^ octave * (1 + (number - 1) % PER_DOUBLING / PER_DOUBLING)
end

local function split(marks, first)
  local fields = {}
  for i = first, #marks, MARK do table.insert(fields, string.sub(marks, i, i + MARK - 1)) end
  return fields
end

-- Notes that a worker holds contents.
function residence.note(tag, model, incarnation, marks, now)
  local key, fields, changed = hints_key(tag, model), split(marks, 1), {}
  local minute = string.format('%d', now / MINUTE_MS)
  for i, known in ipairs(redis.call('HMGET', key, unpack(fields))) do
    local words, num = {minute, incarnation}, 1
    for holder in string.gmatch(known or '', ' (%S+)') do
      if holder ~= incarnation and num < MAX_HOLDERS then
        table.insert(words, holder)
        num = num + 1
      end
    end
    local value = table.concat(words, ' ')
    if value ~= known then
      table.insert(changed, fields[i])
      table.insert(changed, value)
    end
  end
  if #changed == 0 then return end
  if redis.call('HLEN', key) >= MAX_HINTS then
    redis.call('HDEL', key, unpack(redis.call('HRANDFIELD', key, #changed)))
  end
  redis.call('HSET', key, unpack(changed))
  redis.call('PEXPIRE', key, MAX_MINUTES * MINUTE_MS)
end

-- The marks of a job's prompt; nil where its worker keeps no prefixes.
local function kept_marks(job)
  local marks, keeps = unpack(redis.call('HMGET', job.key, 'marks', 'keeps'))
  return keeps == '1' and string.sub(marks or '', MARK + 1) or nil
end

-- Notes a job's prompt: what is deeper than a quarter of it, and the first mark, without which none is looked
-- for.
function residence.note_prompt(tag, job, now)
  local marks = kept_marks(job)
  if not marks or marks == '' then return end
  local deeper = math.max(MARK, #marks - 2 * PER_DOUBLING * MARK)
  marks = string.sub(marks, 1, MARK) .. string.sub(marks, deeper + 1)
  residence.note(tag, job.model, job.owner, marks, now)
end

-- Notes what a worker holds of a job at its end: `marks` of the prompt, and of its answer behind it.
function residence.note_answer(tag, job, marks, now)
  local of_prompt = kept_marks(job)
  local answer = of_prompt and string.sub(marks, #of_prompt + 1) or ''
  if answer ~= '' then residence.note(tag, job.model, job.owner, answer, now) end
end

-- The live workers of a hint; nil where it is none, or too old. `look`: of a claim, remembers who lives.
local function living(tag, model, hint, now, look)
  local minute, found = tonumber(string.match(hint or '', '^%d+')), {}
  if not minute or now / MINUTE_MS - minute > MAX_MINUTES then return nil end
  for holder in string.gmatch(hint, ' (%S+)') do
    local lives = look and look.lives[holder]
    if lives == nil then
      lives = tonumber(redis.call('ZSCORE', tag .. ':workers:' .. model, holder) or 0) >= now - WORKER_TTL_MS
      if look then look.lives[holder] = lives end
    end
    if lives then table.insert(found, holder) end
  end
  return found[1] and found
end

-- The workers that hold the longest prefix of a prompt, and its length in tokens; nil: none does.
function residence.find(tag, model, marks, now, look)
  local key, first = hints_key(tag, model), string.sub(marks, MARK + 1, 2 * MARK)
  if first == '' or not redis.call('HGET', key, first) then return nil end
  local hints = redis.call('HMGET', key, unpack(split(marks, MARK + 1)))
  for number = #hints, 1, -1 do
    local holders = living(tag, model, hints[number], now, look)
    if holders then return holders, position(number) end
  end
end

-- The workers to prefer for a job: of its session, otherwise of its prefix.
local function preferred(look, marks)
  local session, of_session = string.sub(marks, 1, MARK), nil
  if session ~= NONE then
    local hint = redis.call('HGET', look.key, session)
    of_session = living(look.tag, look.model, hint, look.now, look)
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
    key = hints_key(tag, model), num_judged = 0}
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
  local is_known = string.sub(marks, 1, MARK) ~= NONE
    or redis.call('HGET', look.key, string.sub(marks, MARK + 1, 2 * MARK))
  if not is_known then return nil end  -- most prompts
  if not look.verdicts then look.lives, look.loads, look.verdicts = {}, {}, {} end
  if look.verdicts[id] == nil then
    look.num_judged = look.num_judged + 1
    look.verdicts[id] = look.num_judged <= MAX_JUDGED and judged(look, id, marks) or false
  end
  return look.verdicts[id]
end
