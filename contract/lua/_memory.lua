-- Divides the memory of Redis between lanes and their tenants. A job counts in its lane, whatever its
-- model, from its submission until it is forgotten: with its record and all that came with it, and with
-- the log that is expected, from its end on with the log that it has. The bytes are an upper bound of
-- what Redis allocates (tests/contract/test_memory_bounds.py).
--
-- Each lane has a part of its own, which no other lane can take. Beyond it a job is accepted if its
-- tenant then holds, in this lane, at most four times what is left of the common rest: so there is room
-- for who comes next, however much the others hold.
-- requires shared

local MEMORY_SHARE = 0.8    -- of maxmemory, for jobs and what else Redis holds; the rest is for running jobs
local OWN_PARTS = 32        -- each lane has one of so many parts
local MAX_OWN = 8           -- lanes with a whole part; more lanes share these
local TIMES_FREE = 4
local RECORD_BYTES = 9000   -- record, shortest log, and entries in all lists
local CALLBACK_BYTES = 3000  -- its record in the outbox
local EVENT_BYTES = 40      -- of a log's entry, beside the event
local TOKEN_BYTES = 100     -- of a log, for each expected token, beside its log probabilities
local MAX_GUESS = 512       -- tokens that are expected where nothing is known
local PASSING_MS = 15000    -- after its end a synchronous call's result may be forgotten for others
local MAX_FORGOTTEN = 4     -- results that one submit forgets
-- How long a reading is used, and for how many jobs. INFO takes a quarter of the time of a submit.
local READ_MS = 1000
local TRUSTED_JOBS = 16

local num_trusted = 0  -- jobs to accept before the next INFO, over all tags of the server

-- Bytes that an allocator takes for a value: its size classes are a quarter apart.
local function allocated(bytes)
  return math.ceil(bytes * 1.25)
end

local function values_of(key)
  local found, flat = {}, redis.call('HGETALL', key)
  for i = 1, #flat, 2 do found[flat[i]] = math.max(0, whole_number(flat[i + 1]) or 0) end
  return found
end

-- Bytes that all jobs may take; math.huge without a maxmemory. `writes`: the reading may be kept.
function memory.room(tag, writes)
  local known = redis.call('GET', tag .. ':memory')
  if writes then num_trusted = num_trusted - 1 end
  if known == 'free' or known and tonumber(known) and num_trusted >= 0 then
    return known == 'free' and math.huge or tonumber(known)
  end
  local info = redis.call('INFO', 'memory')
  local function figure(name) return tonumber(string.match(info, '\n' .. name .. ':(%d+)') or 0) end
  -- What clients send and read passes.
  local used = figure('used_memory') - figure('mem_not_counted_for_evict') - figure('mem_clients_normal')
  local most, held = figure('maxmemory'), 0
  for _, bytes in pairs(values_of(tag .. ':stored:lanes')) do held = held + bytes end
  local room = most > 0 and math.floor(MEMORY_SHARE * most - math.max(0, used - held)) or math.huge
  if writes then
    redis.call('SET', tag .. ':memory', room == math.huge and 'free' or string.format('%d', room),
      'PX', READ_MS)
    num_trusted = TRUSTED_JOBS - 1
  end
  return room
end

-- Sets the bytes of a job: `fixed`, and `bytes` with the log that is expected, of `token_bytes` a token.
function memory.measure(job, terms, output, basis)
  job.fixed = RECORD_BYTES + allocated(job.num_sent + 8 * (#job.tenant + #job.model + #job.lane))
    + (terms.callback_to ~= '' and CALLBACK_BYTES or 0)
  local guess = basis == 'cap' and math.min(output, MAX_GUESS) or output
  job.token_bytes = TOKEN_BYTES + allocated(terms.logprob_bytes or 0)
  job.bytes = job.fixed + job.token_bytes * guess
    + allocated((terms.vector_bytes or 0) + (terms.prompt_logprob_bytes or 0))
end

-- Bytes of a log's event.
function memory.of_event(event)
  return allocated(#event + EVENT_BYTES)
end

-- The limit that a job exceeds, and whether it would exceed it alone; nil where it fits.
function memory.refusal(tag, job, room)
  if room == math.huge then return nil end
  local lanes, num_lanes, borrowed = values_of(tag .. ':stored:lanes'), 0, 0
  lanes[job.lane] = (lanes[job.lane] or 0) + job.bytes
  for _ in pairs(lanes) do num_lanes = num_lanes + 1 end
  local own = room / OWN_PARTS * math.min(1, MAX_OWN / num_lanes)
  if lanes[job.lane] <= own then return nil end
  for _, bytes in pairs(lanes) do borrowed = borrowed + math.max(0, bytes - own) end
  local common = room * (1 - MAX_OWN / OWN_PARTS)
  local is_alone = job.bytes > TIMES_FREE * (common + own - job.bytes)
  local free = common - borrowed
  if free < 0 then return 'lane_memory', is_alone end
  local line = whole_number(redis.call('HGET', tag .. ':stored:lines', job.lane .. ' ' .. job.tenant) or 0)
  if math.max(0, line or 0) + job.bytes > TIMES_FREE * free then return 'tenant_memory', is_alone end
end

-- Forgets the oldest results of a lane's synchronous calls, which hardly anybody reads again. Whether
-- there were any.
function memory.make_room(tag, lane, now)
  local ids = redis.call('ZRANGE', tag .. ':stored:passing:' .. lane, '-inf', now - PASSING_MS, 'BYSCORE',
    'LIMIT', 0, MAX_FORGOTTEN)
  for _, id in ipairs(ids) do
    local job = load_job(tag, id)
    if job and TERMINAL[job.state] then
      forget(tag, id, job.tenant, job.has_objects, kept_entry(job))
    end
    redis.call('ZREM', tag .. ':stored:passing:' .. lane, id)
  end
  return #ids > 0
end

-- Adds bytes to those of a lane and of a tenant in it.
function memory.add(tag, lane, tenant, bytes)
  for _, where in ipairs({{'lanes', lane}, {'lines', lane .. ' ' .. tenant}}) do
    local key = tag .. ':stored:' .. where[1]
    if redis.call('HINCRBY', key, where[2], bytes) <= 0 then redis.call('HDEL', key, where[2]) end
  end
end
