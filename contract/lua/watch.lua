-- watch: the jobs that a model's live workers hold, its tenants that wait, and how many callbacks of all
-- models wait; for people who watch.
-- KEYS  1 tag
-- ARGV  1 model  2 jobs at most  3… lanes
-- reply {{{incarnation, job id, tenant, lane, attempt, claimed (ms), first token (ms; 0: none yet),
--          prompt tokens, output tokens, output tokens at most}, …},
--        {{lane, tenant, waiting jobs, waiting tokens, weight}, …},
--        {callbacks to be sent, dead letters}}
local MAX_WATCHED = 64  -- tenants of a lane
local MAX_DESTINATIONS_WATCHED = 1000

local function held_by(tag, incarnation, room, found)
  for _, id in ipairs(redis.call('SMEMBERS', tag .. ':own:' .. incarnation)) do
    if #found >= room then return end
    local job = load_job(tag, id)
    if job and job.owner == incarnation then
      local times = numbers(job.key, {'claimed', 'first_token'})
      table.insert(found, {incarnation, id, job.tenant, job.lane, job.attempt, times.claimed,
        times.first_token, job.prompt_tokens, job.tokens, job.max_tokens})
    end
  end
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
  local tag, model, held, waiting = keys[1], argv[1], {}, {}
  local live = redis.call('ZRANGE', tag .. ':workers:' .. model, now_ms() - WORKER_TTL_MS, '+inf',
    'BYSCORE')
  for _, incarnation in ipairs(live) do
    held_by(tag, incarnation, tonumber(argv[2]), held)
  end
  for i = 3, #argv do waiting_in(tag, model, argv[i], waiting) end
  return {held, waiting, callbacks(tag)}
end

register('watch', watch, 'no-writes')
