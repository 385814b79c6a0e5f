-- The workers of a model and the rates at which they drain its lanes. The hash `pool:<model>` holds a
-- worker's average rates and capacity, the lanes, most urgent first, their minimum shares, and for each
-- lane `used:<lane>`: `<window> <tokens claimed in it> <tokens claimed in the window before>`; for each
-- worker that lives and claims no jobs `aside:<incarnation>`, since when (ms); `ready_at` and `start_ms`
-- are those of contract/starts.py.
-- requires shared
local UNKNOWN = -1
local WORKER_TTL_MS = 15000  -- a worker is live until this long after its last heartbeat
local POOL = {'tokens_per_s', 'stream_tokens_per_s', 'max_tokens', 'max_jobs'}
local ASIDE = 'aside:'
local WINDOW_MS = 10000
local OVERDUE_MS = 60000  -- an announced worker is no longer expected so long after its time
local OVERDUE_RETRY_MS = 1000
local MIN_SHARE = 0.05  -- of the rate, assumed for a lane that more urgent lanes leave nothing

-- Tokens claimed from a lane in the current window and in the one before.
local function current_windows(used, now)
  local window, tokens, before = string.match(used or '', '^(%d+) (%d+) (%d+)$')
  local passed = math.floor(now / WINDOW_MS) - tonumber(window or 0)
  if passed > 1 then return 0, 0 end
  if passed == 1 then return 0, tonumber(tokens) end
  return tonumber(tokens), tonumber(before)
end

-- The number of live workers, a worker's average rates and capacity, and each lane's minimum share and
-- recently claimed tokens per second.
function pools.find(tag, model, now)
  local known, pool = {}, {shares = {}, used = {}}
  local flat = redis.call('HGETALL', tag .. ':pool:' .. model)
  for i = 1, #flat, 2 do known[flat[i]] = flat[i + 1] end
  for _, name in ipairs(POOL) do pool[name] = tonumber(known[name] or 0) end
  pool.lanes = known.lanes or ''
  pool.ready_at = tonumber(known.ready_at or 0) or 0
  pool.live = redis.call('ZCOUNT', tag .. ':workers:' .. model, now - WORKER_TTL_MS, '+inf')
  pool.rate = pool.tokens_per_s * math.max(1, pool.live)  -- without live workers, the rate of the first one
  local shares = string.gmatch(known.shares or '', '%S+')
  for name in string.gmatch(pool.lanes, '%S+') do
    local tokens, before = current_windows(known['used:' .. name], now)
    pool.shares[name] = tonumber(shares() or 0)
    pool.used[name] = (tokens + before * (WINDOW_MS - now % WINDOW_MS) / WINDOW_MS) * 1000 / WINDOW_MS
  end
  return pool
end

-- Records tokens claimed from a lane.
function pools.record_use(tag, model, lane, num_tokens, now)
  local key, field = tag .. ':pool:' .. model, 'used:' .. lane
  local tokens, before = current_windows(redis.call('HGET', key, field), now)
  local window = math.floor(now / WINDOW_MS)
  redis.call('HSET', key, field, string.format('%d %d %d', window, tokens + num_tokens, before))
end

-- ms to drain tokens at a rate per second.
function pools.drain_ms(rate, tokens)
  if rate == 0 then return UNKNOWN end
  return math.ceil(tokens * 1000 / rate)
end

-- Tokens per second available to a lane: `left` after the recent use of more urgent lanes and the
-- minimum shares of other lanes with waiting jobs; `own`, its own minimum share.
function pools.available_rates(pool, lane, used, kept)
  return {
    left = math.max(pool.rate * (1 - kept) - used, MIN_SHARE * pool.rate),
    own = (pool.shares[lane] or 0) * pool.rate,
  }
end

-- ms until the next worker is ready; UNKNOWN where none is announced, or none came.
function pools.start_ms(pool, now)
  if now > pool.ready_at + OVERDUE_MS then return UNKNOWN end
  return math.max(pool.ready_at - now, OVERDUE_RETRY_MS)
end

-- ms that a job runs; 0 where unknown, so that no job is refused for it.
function pools.service_ms(pool, output, choices)
  if pool.stream_tokens_per_s == 0 then return 0 end
  return math.ceil(output * 1000 / choices / pool.stream_tokens_per_s)
end
