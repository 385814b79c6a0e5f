-- sweep: what time has done. Anyone may call it.
-- A lapsed lease gives its job back; a passed deadline ends its job.
-- KEYS  1 tag
-- ARGV  1 jobs of each kind at most
-- reply {leases lapsed, jobs expired}
local function sweep(keys, argv)
  local tag, now = keys[1], now_ms(keys[1])
  local due = redis.call('ZRANGE', tag .. ':deadlines', '-inf', now, 'BYSCORE', 'LIMIT', 0, argv[1])
  for _, id in ipairs(due) do
    local job = load_job(tag, id)
    if job and not TERMINAL[job.state] then
      terminate(tag, job, 'expired', now)
    else
      redis.call('ZREM', tag .. ':deadlines', id)
    end
  end
  local lapsed = redis.call('ZRANGE', tag .. ':leases', '-inf', now, 'BYSCORE', 'LIMIT', 0, argv[1])
  for _, id in ipairs(lapsed) do
    local job = load_job(tag, id)
    if job and (job.state == 'claimed' or job.state == 'streaming') then
      redis.call('HSET', job.key, 'lapses', job.lapses + 1)
      give_back(tag, job)
    else
      redis.call('ZREM', tag .. ':leases', id)
    end
  end
  return {#lapsed, #due}
end
redis.register_function{
  function_name = 'batchway_v1_sweep', callback = sweep, flags = {'allow-oom'},
}
