-- snapshot: a model's lanes, workers and totals at one moment; writes nothing.
-- KEYS  1 tag
-- ARGV  1 model  2… lanes
-- reply {now (ms), {field, total, …} with `corrections_total:<kind>` of all models,
--        {{queued jobs, queued tokens, running jobs, running tokens,
--          ms since the oldest waiting job was submitted (0: none waits)}, …} in the lanes' order,
--        {{incarnation, ms since its heartbeat, its status (JSON)}, …} of live workers,
--        {outcome of callback attempts, number, …},
--        {{incarnation, ms since its heartbeat, its status (JSON), its state, ms for which it has been in
--          it}, …} of workers that claim no jobs}
local MAX_LINES = 40  -- tenants whose queues are read, over all lanes

local function first_created(tag, key)
  local id = queue.first_waiting(key)
  return id and tonumber(redis.call('HGET', tag .. ':job:' .. id, 'created') or nil)
end

local function oldest_wait(tag, model, lane, num_lanes, now)
  local oldest = first_created(tag, lane_key(tag, 'back', model, lane)) or now
  local tenants = redis.call('ZRANGE', lane_key(tag, 'active', model, lane), 0, math.ceil(MAX_LINES / num_lanes) - 1)
  for _, tenant in ipairs(tenants) do
    for _, stream_end in pairs(STREAM_ENDS) do
      local stream = lane_key(tag, 'q', model, lane) .. ':' .. tenant .. stream_end
      oldest = math.min(oldest, first_created(tag, stream) or now)
    end
  end
  return now - oldest
end

local function workers_aside(tag, model, now)
  local found = {}
  local fields = redis.call('HGETALL', tag .. ':pool:' .. model)
  for i = 1, #fields, 2 do
    local incarnation = string.match(fields[i], '^' .. ASIDE .. '(.*)$')
    local record = incarnation and redis.call('HMGET', tag .. ':worker:' .. incarnation, 'seen', 'info', 'state')
    local seen = record and whole_number(record[1] or '')
    if seen then
      local since = whole_number(fields[i + 1]) or now
      table.insert(found, {incarnation, now - seen, record[2] or '{}', record[3] or '', now - since})
    end
  end
  return found
end

local function snapshot(keys, argv)
  local tag, model, now = keys[1], argv[1], now_ms()
  local lanes, workers = {}, {}
  for i = 2, #argv do
    local counted = redis.call('HMGET', lane_key(tag, 'counters', model, argv[i]), 'queued_jobs',
      'queued_tokens', 'running_jobs', 'running_tokens')
    for j = 1, 4 do counted[j] = tonumber(counted[j] or 0) end
    counted[5] = oldest_wait(tag, model, argv[i], #argv - 1, now)
    table.insert(lanes, counted)
  end
  local live = redis.call('ZRANGE', tag .. ':workers:' .. model, now - WORKER_TTL_MS, '+inf',
    'BYSCORE', 'WITHSCORES')
  for i = 1, #live, 2 do
    local info = redis.call('HGET', tag .. ':worker:' .. live[i], 'info')
    table.insert(workers, {live[i], now - live[i + 1], info or '{}'})
  end
  local counts = redis.call('HGETALL', tag .. ':totals:' .. model)
  for i, part in ipairs(redis.call('HGETALL', tag .. ':corrections')) do
    table.insert(counts, i % 2 == 1 and 'corrections_total:' .. part or part)
  end
  return {now, counts, lanes, workers, redis.call('HGETALL', tag .. ':deliveries'),
    try(workers_aside, tag, model, now) or {}}
end

register('snapshot', snapshot, 'no-writes')
