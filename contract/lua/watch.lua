-- watch: the jobs that a model's live workers hold, its tenants that wait, and how many callbacks of all
-- models wait; for people who watch.
-- KEYS  1 tag
-- ARGV  1 model  2 jobs at most  3 behind so many  4… lanes
-- reply {{{incarnation, job id, tenant, lane, attempt, claimed (ms), first token (ms; 0: none yet),
--          prompt tokens, output tokens, output tokens at most}, …},
--        {{lane, tenant, waiting jobs, waiting tokens, weight}, …},
--        {callbacks to be sent, dead letters}; {} where jobs or lanes are asked for}
local MAX_WATCHED = 64  -- tenants of a lane
local MAX_DESTINATIONS_WATCHED = 1000

local function row(tag, incarnation, id)
  local key = tag .. ':job:' .. id
  local owner, tenant, lane = unpack(redis.call('HMGET', key, 'owner', 'tenant', 'lane'))
  if owner ~= incarnation or not tenant or not lane then return nil end
  local job = numbers(key, {'attempt', 'claimed', 'first_token', 'prompt_tokens', 'tokens', 'max_tokens'})
  local progress = running.progress(tag, incarnation, id) or job
  return {incarnation, id, tenant, lane, job.attempt, job.claimed, job.first_token, job.prompt_tokens,
    progress.tokens, job.max_tokens}
end

-- Of the jobs that these workers hold, so many behind the first `behind`.
local function held_by(tag, workers, room, behind)
  local found, number = {}, 0
  for _, incarnation in ipairs(workers) do
    for _, id in ipairs(redis.call('SMEMBERS', tag .. ':own:' .. incarnation)) do
      number = number + 1
      if number > behind + room then return found end
      if number > behind then table.insert(found, row(tag, incarnation, id)) end
    end
  end
  return found
end

local function waiting_in(tag, model, lane, found)
  local tenants = redis.call('ZRANGE', lane_key(tag, 'active', model, lane), 0, MAX_WATCHED - 1)
  for _, tenant in ipairs(tenants) do
    local line = numbers(lane_key(tag, 'line', model, lane) .. ':' .. tenant, {'jobs', 'tokens'})
    table.insert(found, {lane, tenant, line.jobs, line.tokens,
      tostring(fairness.weight(tag, tenant))})
  end
end

local function callbacks(tag)
  local due = 0
  local room = MAX_DESTINATIONS_WATCHED
  for _, tenant in ipairs(redis.call('ZRANGE', tag .. ':outbox', 0, room - 1)) do
    local destinations = room > 0 and redis.call('ZRANGE', tag .. ':due:of:' .. tenant, 0, room - 1) or {}
    for _, to in ipairs(destinations) do due = due + redis.call('ZCARD', tag .. ':due:' .. to) end
    room = room - #destinations
  end
  local dead = redis.call('ZCOUNT', outbox.dead(tag, ''), now_ms() - OUTBOX_KEEP_MS, '+inf')
  return {due, dead}
end

local function watch(keys, argv)
  local tag, model, room, waiting = keys[1], argv[1], tonumber(argv[2]), {}
  local live = redis.call('ZRANGE', tag .. ':workers:' .. model, now_ms() - WORKER_TTL_MS, '+inf',
    'BYSCORE')
  for i = 4, #argv do waiting_in(tag, model, argv[i], waiting) end
  return {held_by(tag, live, room, tonumber(argv[3])), waiting, room == 0 and #argv == 3 and callbacks(tag) or {}}
end

register('watch', watch, 'no-writes')
