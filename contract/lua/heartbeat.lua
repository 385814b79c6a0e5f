-- heartbeat: a worker lives; renews the leases of the jobs it runs.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 model  3 lease (ms)  4 'up' | 'draining' (takes no more jobs) | 'gone'
--       5 what it says of itself (JSON)  then 2 for each job: id, epoch
-- reply ids of the jobs that are no longer its own
local function heartbeat(keys, argv)
  local tag, incarnation, lease_ms = keys[1], argv[1], tonumber(argv[3])
  local workers, worker = tag .. ':workers:' .. argv[2], tag .. ':worker:' .. incarnation
  local now = now_ms(tag)
  if argv[4] == 'gone' then
    redis.call('ZREM', workers, incarnation)
    redis.call('DEL', worker)
  else
    if argv[4] == 'up' then
      redis.call('ZADD', workers, now, incarnation)
    else
      redis.call('ZREM', workers, incarnation)
    end
    redis.call('HSET', worker, 'model', argv[2], 'seen', now, 'state', argv[4], 'info', argv[5])
    redis.call('PEXPIRE', worker, 6 * lease_ms)
    redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - 6 * lease_ms)
  end
  local lost = {}
  for i = 6, #argv, 2 do
    if fence(load_job(tag, argv[i]), incarnation, argv[i + 1]) then
      table.insert(lost, argv[i])
    else
      redis.call('ZADD', tag .. ':leases', now + lease_ms, argv[i])
    end
  end
  return lost
end
redis.register_function{
  function_name = 'batchway_v1_heartbeat', callback = heartbeat, flags = {'allow-oom'},
}
