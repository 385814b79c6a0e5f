-- The workers of a model, and how fast a lane of theirs is drained; tests/model/reference_pools.py says the same
-- in Python. `pool:<model>` has what a worker does and holds on average, the lanes, most urgent
-- first, their minimum shares, and of each lane `used:<lane>`: `<window> <tokens that were handed
-- out in it> <in the window before>`.
local UNKNOWN = -1
local WORKER_TTL_MS = 15000  -- a worker unheard of for so long does not count as live
local POOL = {'tokens_per_s', 'stream_tokens_per_s', 'max_tokens', 'max_jobs'}
local WINDOW_MS = 10000
local LEAST_SHARE = 0.05  -- of the rate, that a lane without a share is said to have under a flood

local pools = {}

-- The fields of a hash as numbers, 0 where there is none.
local function numbers(key, names)
  local found = {}
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    found[names[i]] = tonumber(value or 0) or 0
  end
  return found
end

-- What was handed out of a lane in the present window, and in the one before.
local function current_windows(used, now)
  local window, tokens, before = string.match(used or '', '^(%d+) (%d+) (%d+)$')
  local passed = math.floor(now / WINDOW_MS) - tonumber(window or 0)
  if passed > 1 then return 0, 0 end
  if passed == 1 then return 0, tonumber(tokens) end
  return tonumber(tokens), tonumber(before)
end

-- How many live, what one of them does and holds on average, and of each lane its share and the
-- tokens per second that were handed out lately.
function pools.find(tag, model, now)
  local known, pool = {}, {shares = {}, used = {}}
  local flat = redis.call('HGETALL', tag .. ':pool:' .. model)
  for i = 1, #flat, 2 do known[flat[i]] = flat[i + 1] end
  for _, name in ipairs(POOL) do pool[name] = tonumber(known[name] or 0) end
  pool.lanes = known.lanes or ''
  pool.live = redis.call('ZCOUNT', tag .. ':workers:' .. model, now - WORKER_TTL_MS, '+inf')
  pool.rate = pool.tokens_per_s * math.max(1, pool.live)  -- of the first, where it has yet to come
  local shares = string.gmatch(known.shares or '', '%S+')
  for name in string.gmatch(pool.lanes, '%S+') do
    local tokens, before = current_windows(known['used:' .. name], now)
    pool.shares[name] = tonumber(shares() or 0)
    pool.used[name] = (tokens + before * (WINDOW_MS - now % WINDOW_MS) / WINDOW_MS) * 1000 / WINDOW_MS
  end
  return pool
end

-- Tokens of a lane's jobs have been handed out.
function pools.record_use(tag, model, lane, num_tokens, now)
  local key, field = tag .. ':pool:' .. model, 'used:' .. lane
  local tokens, before = current_windows(redis.call('HGET', key, field), now)
  local window = math.floor(now / WINDOW_MS)
  redis.call('HSET', key, field, string.format('%d %d %d', window, tokens + num_tokens, before))
end

-- ms until so many tokens are drained at so many per second.
function pools.drain_ms(rate, tokens)
  if rate == 0 then return UNKNOWN end
  return math.ceil(tokens * 1000 / rate)
end

-- What a lane can count on, in tokens per second: `left` for it and what is before it, once more
-- urgent lanes have had as much as lately and the others with work their shares; `own`, its share.
function pools.available_rates(pool, lane, used, kept)
  return {
    left = math.max(pool.rate * (1 - kept) - used, LEAST_SHARE * pool.rate),
    own = (pool.shares[lane] or 0) * pool.rate,
  }
end

-- ms that a job runs; 0 where unknown, so that nothing is refused for it.
function pools.service_ms(pool, output, choices)
  if pool.stream_tokens_per_s == 0 then return 0 end
  return math.ceil(output * 1000 / choices / pool.stream_tokens_per_s)
end
