-- claim: hands waiting jobs to a worker with room, one after another. A lane that is owed as much of
-- its minimum share as its next job costs goes first, then the lanes in the given order; within a
-- lane first what was given back, then tenants by the tokens they have had. A job that does not
-- fit is passed over by jobs that do, eight times at most: then nothing goes before it.
-- A job under suspicion runs alone: one worker in four at most gets the turn to run one, is handed
-- nothing else while it empties itself, and then that job alone.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 model  3 lease (ms)  4 places at most  5 tokens at most
--       6 '1' where the worker holds nothing  7 version of its configuration
--       8… lanes, most urgent first: name, `<minimum share of the tokens handed out>`, or
--          `<share> <places> <tokens> <owed>`: one of its jobs is handed out only while the call has
--          filled less than so many places, and one choice of it fits into so many tokens, of all
--          lanes together;
--          the lane goes first, where it is owed its share, only while the call has filled less
--          than `owed` places by it. Each choice of a job fills a place. Behind these may stand
--          `<places> <tokens>` of the lane and `<tenant> <places> <tokens>` for each tenant with
--          jobs there: a tenant with less than its share of them, by weight, is handed a job where
--          the lane has no room
-- reply list of {id, epoch, attempt, next event number, hash, output tokens logged,
--                ms to its deadline, 1 where it must run alone, cost, job (msgpack)}
local ANY = 2 ^ 53
local MAX_DEFICIT = 2 ^ 20  -- tokens

-- Whether this worker has the turn to run a suspect of the model; a turn is `<worker> <until ms>`.
local function has_turn(tag, model, incarnation, lease_ms, now)
  local queue, turn = tag .. ':q:' .. model .. ':suspect', tag .. ':turn:' .. model
  if not find_fit(tag, queue, ANY, {}) then return false end
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
  local found = find_fit(tag, queue, ANY, {})
  while found do
    local job = claim_job(tag, found, incarnation, lease_ms, now, config)
    if job then
      redis.call('SADD', tag .. ':alone:' .. model, found.id)
      redis.call('DEL', tag .. ':turn:' .. model)
      return {job}
    end
    found = find_fit(tag, queue, ANY, {})
  end
  return {}
end

-- The lanes of the call: {name, share, places, room, owed, taken, fair}, …
local function lanes_of(tag, argv)
  local lanes = {}
  for i = 8, #argv, 2 do
    local words = {}
    for word in string.gmatch(argv[i + 1], '%S+') do table.insert(words, word) end
    table.insert(lanes, {
      name = argv[i], share = tonumber(words[1]), slots = tonumber(words[2] or argv[4]),
      room = tonumber(words[3] or argv[5]), max_deficit_slots = tonumber(words[4]) or ANY, num_taken = 0,
      fair = words[5] and fairness.parse_slots(tag, words),
    })
  end
  return lanes
end

-- Whether a job may wait in one of the lanes: asked in one command, where to search them takes two
-- for each. Mostly none does, once a claim has been handed what there was.
local function has_waiting(tag, model, lanes)
  local keys = {}
  for _, lane in ipairs(lanes) do
    table.insert(keys, lane_key(tag, 'back', model, lane.name))
    table.insert(keys, lane_key(tag, 'active', model, lane.name))
  end
  return #keys > 0 and redis.call('EXISTS', unpack(keys)) > 0
end

-- The next job of a tenant with less than its share of a lane's places, given back ones first; those
-- that it passes over, in `skipped`.
local function next_below_share(tag, model, lane, skipped)
  local passed = {}
  local found = find_fit(tag, lane_key(tag, 'back', model, lane.name), 0, passed, lane.fair)
  if found then
    for _, id in ipairs(passed) do table.insert(skipped, id) end
    return found
  end
  local tenants = redis.call('ZRANGE', lane_key(tag, 'active', model, lane.name), 0, MAX_TENANTS - 1)
  for _, tenant in ipairs(tenants) do
    local room = fairness.tenant_room(tag, lane.fair, tenant)
    if room > 0 then
      local passed, line = {}, lane_key(tag, 'q', model, lane.name) .. ':' .. tenant
      found = find_fit(tag, line, room, passed)
      if found then
        for _, id in ipairs(passed) do table.insert(skipped, id) end
        found.tenant = tenant
        return found
      end
    end
  end
end

-- The job to hand out next, and its lane; those that it passes over, in `skipped`.
local function choose(tag, model, lanes, num_filled, skipped)
  for _, lane in ipairs(lanes) do
    local deficit = 0
    if num_filled < lane.slots and lane.num_taken < lane.max_deficit_slots and lane.share > 0 then
      deficit = tonumber(redis.call('HGET', tag .. ':owed:' .. model, lane.name) or 0)
    end
    if deficit > 0 then
      local passed = {}
      local found, is_blocked = next_in_lane(tag, model, lane.name, lane.room, passed)
      if is_blocked then return nil end
      if found and found.cost <= deficit then
        for _, id in ipairs(passed) do table.insert(skipped, id) end
        return found, lane.name
      end
    end
  end
  for _, lane in ipairs(lanes) do
    if lane.slots > num_filled then
      local found, is_blocked = next_in_lane(tag, model, lane.name, lane.room, skipped)
      if found or is_blocked then return found, lane.name end
    elseif lane.slots == 0 and lane.fair then
      local found = next_below_share(tag, model, lane, skipped)
      if found then return found, lane.name end
    end
  end
end

-- Books tokens handed out in a lane: every lane with work is owed its share of them.
local function record_claim(tag, model, lanes, name, tokens, now)
  pools.record_use(tag, model, name, tokens, now)
  for _, lane in ipairs(lanes) do
    if lane.share > 0 then
      local key = tag .. ':owed:' .. model
      local before = tonumber(redis.call('HGET', key, lane.name) or 0)
      local deficit = before + lane.share * tokens
      if lane.name == name then deficit = deficit - tokens end
      local queued = redis.call('HGET', lane_key(tag, 'counters', model, lane.name), 'queued_jobs')
      if tonumber(queued or 0) == 0 then deficit = 0 end
      deficit = math.max(0, math.min(MAX_DEFICIT, deficit))
      if deficit ~= before then redis.call('HSET', key, lane.name, deficit) end
    end
  end
end

local function claim(keys, argv)
  local tag, incarnation, model, lease_ms = keys[1], argv[1], argv[2], tonumber(argv[3])
  local now, lanes = now_ms(), lanes_of(tag, argv)
  if has_turn(tag, model, incarnation, lease_ms, now) then
    return argv[6] == '1' and claim_suspect(tag, model, incarnation, lease_ms, now, argv[7])
      or {}
  end
  local claimed, num_filled = {}, 0
  while has_waiting(tag, model, lanes) do
    local skipped = {}
    local found, lane = choose(tag, model, lanes, num_filled, skipped)
    if not found then break end
    local job = claim_job(tag, found, incarnation, lease_ms, now, argv[7])
    if job then
      for _, served in ipairs(lanes) do
        served.room = served.room - found.cost
        if served.name == lane then
          served.num_taken = served.num_taken + found.choices
          if found.tenant then
            fairness.add_held(tag, served.fair, found.tenant, found.choices, found.cost)
          end
        end
      end
      num_filled = num_filled + found.choices
      for _, id in ipairs(skipped) do redis.call('HINCRBY', tag .. ':job:' .. id, 'passed', 1) end
      record_claim(tag, model, lanes, lane, found.cost, now)
      table.insert(claimed, job)
    end
  end
  return claimed
end

register('claim', claim, 'allow-oom')
