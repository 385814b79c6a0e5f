-- operation_step: renews the lease of an operation and works through its next jobs. `cancel` ends jobs and
-- `replay_callbacks` schedules dead letters here; the jobs of `replay` are handed to the gateway, which
-- submits them again and reports them with its next call. Calls of flows are left to their flows.
-- KEYS  1 tag
-- ARGV  1 operation id  2 token  3 lease (ms; 0: gives it back)  4 records read at most
--       5 jobs that match at most  6 after a handed out page its cursor ('': none)
--       7 … then the operation's matched, done and failed jobs
-- reply {'FENCED'}  another gateway's, or no such operation
--       {'OK', state, matched, done, failed, job ids, cursor}
--         job ids   of `cancel`, flows that were ended, whose calls go on: `<id> <tenant>`; of `replay`,
--                   those to submit, with the cursor behind them
--         state     running, completed, cancelled, expired
local FIELDS = {
  'state', 'token', 'lease', 'kind', 'tenant', 'wanted', 'created', 'cursor', 'matched', 'done', 'failed',
}
local NUMERIC = {'lease', 'created', 'matched', 'done', 'failed'}

local function load_operation(key)
  local op = {key = key}
  for i, value in ipairs(redis.call('HMGET', key, unpack(FIELDS))) do op[FIELDS[i]] = value end
  for _, name in ipairs(NUMERIC) do op[name] = whole_number(op[name] or 0) or 0 end
  return op
end

-- Whether a job of the list matches.
local function is_meant(tag, op, id, filter)
  local job = tag .. ':job:' .. id
  if op.kind == 'replay_callbacks' then
    local record = redis.call('HMGET', tag .. ':out:' .. id, 'kind', 'lane', 'model', 'code', 'created')
    local created = whole_number(record[5] or 0) or 0
    return record[1] and created > filter.since and (filter.before == 0 or created < filter.before)
      and filters.match(filter, record, filter.metadata and redis.call('HGET', job, 'metadata'))
  end
  local record = redis.call('HMGET', job, 'state', 'lane', 'model', 'code', 'metadata', 'part')
  if not record[1] or (TERMINAL[record[1]] or false) == (op.kind == 'cancel') then return false end
  if record[6] == 'child' or record[6] == 'nested' then return false end
  return filters.match(filter, record, record[5])
end

-- Does what the operation is for; returns 'failed' or 'done', and the tenant of a flow's job.
local function act(tag, op, id, now)
  if op.kind == 'replay_callbacks' then
    return outbox.replay(tag, id, op.tenant, now) == 'OK' and 'done' or 'failed'
  end
  local job = load_job(tag, id)
  if not job then return 'failed' end
  terminate(tag, job, 'cancelled', now)
  return 'done', is_flow(job) and job.tenant
end

-- Works through rows of the list; returns ids for the gateway, and the cursor.
local function work(tag, op, max_looks, max_jobs, now)
  local created, id = unpack(cmsgpack.unpack(op.cursor))
  local is_jobs, filter = op.kind ~= 'replay_callbacks', filters.unpack(op.wanted)
  local list = tag .. (is_jobs and ':jobs:' or ':dead:') .. op.tenant
  local rows, is_more = filters.rows(list, {created = created, id = id}, max_looks)
  local ids, num_matched = {}, 0
  for _, row in ipairs(rows) do
    if num_matched == max_jobs then
      return ids, cmsgpack.pack({created, id})
    end
    if is_jobs and row.created <= filter.since then
      is_more = false
      break
    end
    created, id = row.created, row.id
    if try(is_meant, tag, op, id, filter) then
      num_matched = num_matched + 1
      if op.kind == 'replay' then
        table.insert(ids, id)
      else
        local count, flows = unpack(try(function() return {act(tag, op, id, now)} end) or {'failed'})
        if flows then table.insert(ids, id .. ' ' .. flows) end
        op.matched, op[count] = op.matched + 1, op[count] + 1
      end
    end
  end
  return ids, is_more and cmsgpack.pack({created, id}) or AT_END
end

local function operation_step(keys, argv)
  local tag, id, now = keys[1], argv[1], now_ms()
  local op = load_operation(tag .. ':operation:' .. id)
  if op.token ~= argv[2] or op.lease <= now then return {'FENCED'} end
  redis.call('HSET', op.key, 'lease', now + tonumber(argv[3]))
  local ids, cursor = {}, ''
  if op.state == 'running' then
    if argv[6] ~= '' then
      op.cursor, op.matched = argv[6], tonumber(argv[7])
      op.done, op.failed = tonumber(argv[8]), tonumber(argv[9])
    end
    if tonumber(argv[5]) > 0 and op.cursor ~= AT_END then
      ids, cursor = work(tag, op, tonumber(argv[4]), tonumber(argv[5]), now)
      if op.kind ~= 'replay' or #ids == 0 then op.cursor = cursor end
    end
    redis.call('HSET', op.key, 'cursor', op.cursor, 'matched', op.matched, 'done', op.done, 'failed',
      op.failed)
    if op.cursor == AT_END then op.state = 'completed' end
    if op.state == 'running' and now - op.created > OPEN_MS then op.state = 'expired' end
    if op.state ~= 'running' then operations.finish(tag, id, op.state, now) end
  end
  return {'OK', op.state, op.matched, op.done, op.failed, ids, cursor}
end

register('operation_step', operation_step, 'allow-oom')
