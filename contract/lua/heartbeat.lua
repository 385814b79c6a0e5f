-- heartbeat: reports that a worker is alive and renews the leases of its jobs.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 model  3 lease (ms)  4 'up' | 'loading' (its lost engine is loaded again) |
--       'draining' (claims no more jobs) | 'gone'
--       5 status of its jobs and KV blocks, its configuration (JSON)
--       6 tokens per second of the worker, 7 of one stream (0: not measured)
--       8 tokens, 9 jobs that it holds at most (0: unknown)
--       10 lanes that it serves, most urgent first: `<lane>` or `<lane>=<minimum share>`, separated by
--          spaces
--       11 its counts since its start (msgpack {field of the totals: number}, '': none)
--       then 2 for each job: id, epoch
-- reply ids of the jobs that the worker no longer holds
local POOL_TTL_MS = 3600 * 1000  -- a measured rate is forgotten after this long without a heartbeat

-- A pool of more workers is measured at most once in so long: one worker moves its means little, and
-- each heartbeat would read the records of all.
local MANY, MEASURE_MS = 16, 1000

-- Stores the mean rates and capacities of the live workers that have measured them.
local function measure_pool(tag, model, now)
  local sums, known, workers = {}, {}, tag .. ':workers:' .. model
  local pool = tag .. ':pool:' .. model
  if redis.call('ZCOUNT', workers, now - WORKER_TTL_MS, '+inf') > MANY then
    local age = now - (tonumber(redis.call('HGET', pool, 'measured_at') or 0) or 0)
    if age >= 0 and age < MEASURE_MS then return end
    redis.call('HSET', pool, 'measured_at', now)
  end
  local live = redis.call('ZRANGE', workers, now - WORKER_TTL_MS, '+inf', 'BYSCORE')
  for _, incarnation in ipairs(live) do
    for name, value in pairs(numbers(tag .. ':worker:' .. incarnation, POOL)) do
      sums[name] = (sums[name] or 0) + value
      known[name] = (known[name] or 0) + (value > 0 and 1 or 0)
    end
  end
  for name, sum in pairs(sums) do
    if sum > 0 then redis.call('HSET', pool, name, sum / known[name]) end
  end
  redis.call('PEXPIRE', pool, POOL_TTL_MS)
end

-- Stores the lanes that a worker serves, and their minimum shares.
local function keep_lanes(tag, model, served)
  local names, shares = {}, {}
  for name, share in string.gmatch(served, '([^%s=]+)=?(%S*)') do
    table.insert(names, name)
    table.insert(shares, share ~= '' and share or '0')
  end
  redis.call('HSET', tag .. ':pool:' .. model, 'lanes', table.concat(names, ' '),
    'shares', table.concat(shares, ' '))
end

-- Notes since when a worker that lives claims no jobs, and forgets those of which nothing is heard.
local function note_aside(tag, pool, incarnation, is_aside, now)
  if not is_aside then
    redis.call('HDEL', pool, ASIDE .. incarnation)
    return
  end
  for _, name in ipairs(redis.call('HKEYS', pool)) do
    local other = string.match(name, '^' .. ASIDE .. '(.*)$')
    if other and redis.call('EXISTS', tag .. ':worker:' .. other) == 0 then redis.call('HDEL', pool, name) end
  end
  redis.call('HSETNX', pool, ASIDE .. incarnation, now)
end

local function heartbeat(keys, argv)
  local tag, incarnation, model, lease_ms = keys[1], argv[1], argv[2], tonumber(argv[3])
  local workers, worker = tag .. ':workers:' .. model, tag .. ':worker:' .. incarnation
  local now, counted = now_ms(), argv[11] ~= '' and cmsgpack.unpack(argv[11])
  if counted then totals.merge(tag, model, incarnation, counted) end
  if argv[4] == 'gone' then
    redis.call('ZREM', workers, incarnation)
    redis.call('DEL', worker)
  else
    if argv[4] == 'up' then
      redis.call('ZADD', workers, now, incarnation)
      ab.report(tag, model, argv[5], now, lease_ms)
    else
      redis.call('ZREM', workers, incarnation)
    end
    redis.call('HSET', worker, 'model', model, 'seen', now, 'state', argv[4], 'info', argv[5],
      POOL[1], argv[6], POOL[2], argv[7], POOL[3], argv[8], POOL[4], argv[9])
    redis.call('PEXPIRE', worker, 6 * lease_ms)
    redis.call('ZREMRANGEBYSCORE', workers, '-inf', now - 6 * lease_ms)
    keep_lanes(tag, model, argv[10])
  end
  local is_aside = argv[4] == 'loading' or argv[4] == 'draining'
  note_aside(tag, tag .. ':pool:' .. model, incarnation, is_aside, now)
  measure_pool(tag, model, now)
  local lost = {}
  for i = 12, #argv, 2 do
    local state, owner, epoch = unpack(redis.call('HMGET', tag .. ':job:' .. argv[i], 'state', 'owner', 'epoch'))
    if OPEN[state] and owner == incarnation and tonumber(epoch) == tonumber(argv[i + 1]) then
      redis.call('ZADD', tag .. ':leases', now + lease_ms, argv[i])
    else
      table.insert(lost, argv[i])
    end
  end
  return lost
end

register('heartbeat', heartbeat, 'allow-oom')
