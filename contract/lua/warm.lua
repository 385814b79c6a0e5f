-- warm: leaves a prompt that may come to a worker that holds the longest part of it (warm_take.lua).
-- KEYS  1 tag
-- ARGV  1 model  2 tenant  3 lane  4 marks, as of a job  5 WarmPrompt (msgpack)  6 ms to live
-- reply 1 where little of what was computed so for the tenant within an hour was of use, else 0
-- `warm:<incarnation>` lists a worker's last MAX_WARMS; they end with the last one.
local MAX_WARMS, MAX_WARM_BYTES = 8, 2 ^ 19
-- Idle time costs electricity, and the job that comes waits for the end of a step.
local TELLING_TOKENS, MIN_USED_SHARE = 8192, 0.1

local function warm(keys, argv)
  local tag, model, now = keys[1], argv[1], now_ms()
  local holders = #argv[5] <= MAX_WARM_BYTES and residence.find(tag, model, argv[4], now)
  if holders then
    local key = tag .. ':warm:' .. holders[1]
    redis.call('RPUSH', key, cmsgpack.pack({argv[2], argv[3], now + argv[6], argv[5]}))
    redis.call('LTRIM', key, -MAX_WARMS, -1)
    redis.call('PEXPIRE', key, argv[6])
    redis.call('PUBLISH', tag .. ':ctl:' .. holders[1], 'warm')
  end
  local worth = numbers(tag .. ':warmth:' .. model .. ':' .. argv[2], {'tokens', 'used'})
  return worth.tokens >= TELLING_TOKENS and worth.used < MIN_USED_SHARE * worth.tokens and 1 or 0
end

redis.register_function('batchway_v1_warm', warm)
