-- read: a job's record and its log after a given event, for its caller.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant  3 after this event number (0: from the start)  4 events at most, and about
--       MAX_BYTES, but two, the first of which a reader may have: a page ends the log where it holds the
--       event before the record's `next`
-- reply {'NOT_FOUND'} no such job of the tenant
--       {'OK', {field, value, …}, {`<event number> <hash> <event>`, …}, position}
--       position  {jobs ahead, tokens ahead, ms until it starts (-1: unknown)} of a job that waits in
--              its tenant's queue, else {}; computed in constant time
local MAX_BYTES = 2 ^ 17

local function queue_position(tag, id, key)
  local job = load_job(tag, id)
  if job.state ~= 'queued' or not ledger.is_in_tenant_queue(job) then return {} end
  local pool = pools.find(tag, job.model, now_ms())
  local mark = numbers(key, {'turn_jobs', 'turn_tokens', 'cold_ms'})
  local line = numbers(ledger.tenant_queue_key(tag, job), {'left_jobs', 'left_tokens', 'jobs', 'tokens'})
  local num_early = queue.count_early(tag, job)
  local early_tokens = math.floor(num_early * (line.tokens - job.cost) / math.max(1, line.jobs - 1))
  job.weight = fairness.weight(tag, job.tenant)
  local ahead = admission.ahead(tag, job, pool, math.max(0, mark.turn_jobs - line.left_jobs) + num_early,
    math.max(0, mark.turn_tokens - line.left_tokens) + early_tokens, 1)
  local reserved = numbers(tag .. ':tenant:' .. job.tenant, {'reserved'}).reserved
  local wait = admission.is_below_share(pool, job, ahead, reserved) and 0
    or admission.wait_ms(pool, ahead, job.cost, mark.cold_ms)
  return {ahead.jobs, ahead.tokens, wait}
end

-- Events of a log; twice as many at a time as before, as their sizes are not known.
local function page(tag, id, after, max_events)
  local entries, bytes, count, from = {}, 0, 2, string.format('%d-0', after + 1)
  while #entries < max_events and bytes < MAX_BYTES do
    count = math.min(count, max_events - #entries)
    local found = redis.call('XRANGE', tag .. ':log:' .. id, from, '+', 'COUNT', count)
    for _, entry in ipairs(found) do
      table.insert(entries, entry[2][2])
      bytes = bytes + #entry[2][2]
    end
    if #found < count then break end
    from, count = '(' .. found[count][1], 2 * count
  end
  return entries
end

local function read(keys, argv)
  local tag, id = keys[1], argv[1]
  local key = tag .. ':job:' .. id
  if redis.call('HGET', key, 'tenant') ~= argv[2] then return {'NOT_FOUND'} end
  return {'OK', view(tag, id), page(tag, id, tonumber(argv[3]), tonumber(argv[4])),
    queue_position(tag, id, key)}
end

register('read', read, 'no-writes')
