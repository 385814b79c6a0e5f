-- append: one step's output of all of a worker's jobs; ends those that are done. Renews leases.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 lease (ms)  then 9 for each job:
--       id, epoch, event number, event (msgpack, '': none), output tokens in it,
--       '' | 'succeeded' | 'failed', error code, error message, where its log is kept from its end
--       on (msgpack ObjectRef, '': here)
-- reply one verdict for each job, in order:
--       {'OK', next event number}  appended, or appended before
--       {'GAP', next event number} events are missing before this one
--       {'OVER', output tokens}    more output than the job's cap: not appended
--       {'FENCED'}                 the job is another worker's, or waits
--       {'GONE'}                   no such job
--       {status}                   the job has ended: succeeded, failed, cancelled, expired
local function append_one(tag, now, incarnation, lease_ms, id, epoch, number, event, num_tokens,
                          fin, code, message, result, said)
  local job = load_job(tag, id)
  local refusal = fence(job, incarnation, epoch)
  if refusal then return {refusal} end
  if number < job.next then return {'OK', job.next} end
  if number > job.next then return {'GAP', job.next} end
  if now >= job.deadline then
    terminal(tag, job, 'expired', '', '', now)
    return {'expired'}
  end
  if job.tokens + num_tokens > job.max_tokens then return {'OVER', job.tokens} end

  redis.call('ZADD', tag .. ':leases', now + lease_ms, id)
  if event ~= '' then
    local done = ledger.done(job)
    job.tokens = job.tokens + num_tokens
    ledger.progress(tag, job, ledger.done(job) - done)
    redis.call('HSET', job.key, 'state', 'streaming', 'tokens', job.tokens)
    if num_tokens > 0 then
      if redis.call('HSETNX', job.key, 'first_token', now) == 1 then totals.began(tag, job, now) end
      local model = said[job.model] or {}
      said[job.model] = model
      model[job.lane] = (model[job.lane] or 0) + num_tokens
    end
    log_event(tag, job, event)
    local every = fin == '' and job.callback_every or 0
    if every > 0 and job.tokens % every < num_tokens then
      outbox.post(tag, job, 'progress', now, '', '')
    end
  end
  if fin ~= '' then terminal(tag, job, fin, code, message, now, result) end
  return {'OK', job.next}
end

local function append(keys, argv)
  local tag, now = keys[1], now_ms(keys[1])
  local incarnation, lease_ms = argv[1], tonumber(argv[2])
  local verdicts, said = {}, {}  -- said: output tokens by model and lane
  for i = 3, #argv, 9 do
    table.insert(verdicts, append_one(tag, now, incarnation, lease_ms, argv[i], argv[i + 1],
      tonumber(argv[i + 2]), argv[i + 3], tonumber(argv[i + 4]), argv[i + 5], argv[i + 6],
      argv[i + 7], argv[i + 8], said))
  end
  for model, lanes in pairs(said) do
    for lane, num_tokens in pairs(lanes) do
      totals.add(tag, model, 'generation_tokens_total:' .. lane, num_tokens)
    end
  end
  return verdicts
end
redis.register_function{
  function_name = 'batchway_v1_append', callback = append, flags = {'allow-oom'},
}
