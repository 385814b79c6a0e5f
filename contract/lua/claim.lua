-- claim: assigns waiting jobs to a worker with room, one after another. A lane whose deficit of its
-- minimum share covers its next job goes first, then the lanes in the given order; within a lane
-- returned jobs, then tenants by fair sharing (_fairness.lua). Jobs that fit may pass a job that does
-- not fit, at most MAX_PASSED times.
-- A suspect job runs alone: at most one worker in four gets the turn to run one. It claims nothing else
-- until it is idle, and then that job alone. What is paused (_pauses.lua) stays where it waits.
-- Where nothing else can be claimed, a worker takes what others offer (release.lua).
-- A call ends or assigns beyond the lanes' rooms at most MAX_BEYOND jobs, and then wakes workers to call again.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 model  3 lease (ms)  4 slots at most  5 tokens at most, also of an offered job
--       6 '1' where the worker is idle, otherwise '0'; where it keeps prefixes, ` <us>`: what a token of a
--          prompt takes it
--       7 version of its configuration, then ` candidate` where that is the candidate (_ab.lua)
--       8… lanes, most urgent first: name, then `<minimum share of the claimed tokens>` or
--          `<share> <slots> <tokens> <deficit slots>`: the call claims a job of the lane only while it
--          has filled fewer than `slots` over all lanes and one choice of the job fits into the tokens
--          that are left; the lane goes first because of a deficit only while it has filled fewer than
--          `deficit slots`. Each choice of a job fills a slot. `<slots> <tokens>` of the lane at the
--          worker and `<tenant> <slots> <tokens>` for each tenant there may follow: a tenant below its
--          share by weight is assigned a job although the lane has no room
-- reply list of {id, epoch, attempt, next event number, hash, output tokens logged,
--                ms to its deadline, 1 where it must run alone, cost, job (msgpack)}; then, where jobs
--       were left to others (_residence.lua), ms until they are no more
local ANY = 2 ^ 53
local MAX_DEFICIT = 2 ^ 20  -- tokens
local MAX_OFFERS = 64  -- looked at for a job
local MAX_BEYOND = 3

-- Whether this worker has or gets the turn to run a suspect; a turn is `<worker> <until ms>`.
local function has_turn(tag, model, incarnation, lease_ms, now, paused)
  local stream, turn = tag .. ':q:' .. model .. ':suspect', tag .. ':turn:' .. model
  if not queue.find_fit(tag, stream, ANY, {}, nil, paused) then return false end
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

-- Claims a suspect for an idle worker with the turn: {job}, or {} where all have expired.
local function claim_suspect(tag, model, incarnation, lease_ms, now, config, paused)
  local stream = tag .. ':q:' .. model .. ':suspect'
  for _ = 1, MAX_BEYOND do
    local found = queue.find_fit(tag, stream, ANY, {}, nil, paused)
    if not found then return {} end
    local job = queue.claim_job(tag, found, incarnation, lease_ms, now, config)
    if job then
      redis.call('SADD', tag .. ':alone:' .. model, found.id)
      redis.call('DEL', tag .. ':turn:' .. model)
      return {job}
    end
  end
  redis.call('PUBLISH', tag .. ':wake:' .. model, '')
  return {}
end

-- The lanes of the call that are not paused:
-- {name, share, slots, room, max_deficit_slots, num_taken, fair}, …
local function lanes_of(tag, argv, paused)
  local lanes, weights = {}, fairness.weights(tag)
  for i = 8, #argv, 2 do
    local words = {}
    for word in string.gmatch(argv[i + 1], '%S+') do table.insert(words, word) end
    if not pauses.hold(paused, argv[i], '') then
      table.insert(lanes, {
        name = argv[i], share = tonumber(words[1]), slots = tonumber(words[2] or argv[4]),
        room = tonumber(words[3] or argv[5]), max_deficit_slots = tonumber(words[4]) or ANY,
        num_taken = 0, fair = words[5] and fairness.parse_slots(tag, words, weights),
      })
    end
  end
  return lanes
end

-- Whether a job may wait in one of the lanes with slots left: one command in place of two for each lane. The last
-- search of a claim mostly finds none.
local function has_waiting(tag, model, lanes, num_filled)
  local keys = {}
  for _, lane in ipairs(lanes) do
    if lane.slots > num_filled or lane.slots == 0 and lane.fair then
      table.insert(keys, lane_key(tag, 'back', model, lane.name))
      table.insert(keys, lane_key(tag, 'active', model, lane.name))
    end
  end
  return #keys > 0 and redis.call('EXISTS', unpack(keys)) > 0
end

-- The next job of a tenant below its share of a lane's slots, returned jobs first; adds the jobs that it
-- passes over to `skipped`.
local function next_below_share(tag, model, lane, skipped, searched, paused)
  local passed = {}
  local back = lane_key(tag, 'back', model, lane.name)
  local found = queue.find_fit(tag, back, 0, passed, lane.fair, paused)
  if found then
    for _, id in ipairs(passed) do table.insert(skipped, id) end
    return found
  end
  return (queue.first_of_tenants(tag, model, lane.name, paused, function(tenant)
    local room, passed = fairness.tenant_room(tag, lane.fair, tenant), {}
    if room <= 0 then return nil end
    found = queue.next_of_tenant(tag, model, lane.name, tenant, room, passed, searched)
    if found then
      for _, id in ipairs(passed) do table.insert(skipped, id) end
      found.tenant = tenant
    end
    return found
  end))
end

-- The job to claim next, and its lane; nil and a lane where the next job waits for more room. Adds the jobs
-- that it passes over to `skipped`.
local function choose(tag, model, lanes, num_filled, skipped, searched, paused)
  for _, lane in ipairs(lanes) do
    local deficit = 0
    if num_filled < lane.slots and lane.num_taken < lane.max_deficit_slots and lane.share > 0 then
      deficit = tonumber(redis.call('HGET', tag .. ':owed:' .. model, lane.name) or 0)
    end
    if deficit > 0 then
      local passed = {}
      local found, is_blocked = queue.next_in_lane(tag, model, lane.name, lane.room, passed, searched,
        paused)
      if is_blocked then return nil, lane.name end
      if found and found.cost <= deficit then
        for _, id in ipairs(passed) do table.insert(skipped, id) end
        return found, lane.name
      end
    end
  end
  for _, lane in ipairs(lanes) do
    if lane.slots > num_filled then
      local found, is_blocked = queue.next_in_lane(tag, model, lane.name, lane.room, skipped, searched,
        paused)
      if found or is_blocked then return found, lane.name end
    elseif lane.slots == 0 and lane.fair then
      local found = next_below_share(tag, model, lane, skipped, searched, paused)
      if found then return found, lane.name end
    end
  end
end

-- As `choose`, for a job that another worker offers. A job of an A/B stays with its arm.
local function take_offer(tag, model, lanes, argv, num_filled, now)
  for _, lane in ipairs(lanes) do
    local offers = lane_key(tag, 'offers', model, lane.name)
    local found = lane.slots > num_filled
      and redis.call('ZRANGE', offers, now, '+inf', 'BYSCORE', 'LIMIT', 0, MAX_OFFERS) or {}
    for _, offer in ipairs(found) do
      local job = load_job(tag, string.match(offer, '^%S+'))
      local choices = math.max(1, job and job.choices or 1)
      if not job or offer ~= string.format('%s %d %d', job.id, job.epoch, job.next) or job.owner == ''
        or job.lane ~= lane.name then
        redis.call('ZREM', offers, offer)  -- it has been taken, or has gone on
      elseif job.owner ~= argv[1] and (job.arm or '') == ''
        and job.cost / choices <= math.min(argv[5], lane.room) then
        redis.call('PUBLISH', tag .. ':ctl:' .. job.owner, 'taken ' .. job.id .. ' ' .. job.epoch)
        redis.call('HSET', job.key, 'attempt', job.attempt - 1)
        requeue(tag, job)
        return {key = tag .. ':' .. job.stream, entry = job.entry, id = job.id, cost = job.cost,
          choices = choices}, lane.name
      end
    end
  end
end

-- Records tokens claimed from a lane: the deficit of each lane with waiting jobs grows by its share.
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
  local now, paused = now_ms(), pauses.find(tag, model)
  local lanes = lanes_of(tag, argv, paused)
  local config, is_candidate = string.match(argv[7], '^(%S*)( ?)')
  local is_idle, token_us = string.match(argv[6], '^(%S*) ?(%S*)$')
  if has_turn(tag, model, incarnation, lease_ms, now, paused) then
    return is_idle == '1' and claim_suspect(tag, model, incarnation, lease_ms, now, config, paused)
      or {}
  end
  for _, lane in ipairs(paused and lanes or {}) do
    fairness.keep_up(tag, model, lane.name, pauses.tenants_in(paused, lane.name))
  end
  local claimed, num_filled, num_beyond, searched, look = {}, 0, 0, nil, nil
  while true do
    local skipped, found, lane = {}, nil, nil
    if has_waiting(tag, model, lanes, num_filled) then
      if not searched then
        searched = ab.searched(tag, model, is_candidate ~= '', now)
        look = token_us ~= '' and residence.look(tag, model, incarnation, tonumber(token_us), now)
        searched.look = look
      end
      found, lane = choose(tag, model, lanes, num_filled, skipped, searched, paused)
    end
    if not lane then found, lane = take_offer(tag, model, lanes, argv, num_filled, now) end
    if not found then break end
    local job = queue.claim_job(tag, found, incarnation, lease_ms, now, config, token_us ~= '')
    if not job or found.tenant then num_beyond = num_beyond + 1 end
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
      if look and look.loads then look.loads[incarnation] = nil end
    end
    if num_beyond == MAX_BEYOND then
      redis.call('PUBLISH', tag .. ':wake:' .. model, lane)
      break
    end
  end
  if look and look.again_ms then table.insert(claimed, math.ceil(look.again_ms - now)) end
  return claimed
end

register('claim', claim, 'allow-oom')
