-- mine: running jobs of a worker that it does not know, because the reply to its claim was lost.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 lease (ms)  3… ids of the jobs it knows
-- reply as claim
local function mine(keys, argv)
  local tag, now, lease_ms = keys[1], now_ms(), tonumber(argv[2])
  local known, found = {}, {}
  for i = 3, #argv do known[argv[i]] = true end
  for _, id in ipairs(redis.call('SMEMBERS', tag .. ':own:' .. argv[1])) do
    local job = not known[id] and load_job(tag, id)
    if job and job.owner == argv[1] then
      redis.call('ZADD', tag .. ':leases', now + lease_ms, id)
      table.insert(found, claim_reply(tag, job, now))
    end
  end
  return found
end

register('mine', mine, 'allow-oom')
