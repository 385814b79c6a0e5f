-- warm_take: gives a worker without jobs a prompt to compute, unless its tenant or lane is paused.
-- KEYS  1 tag
-- ARGV  1 incarnation  2 model  3… for each tenant, since the last call: its name, tokens computed so, those of
--       them with which later prompts began
-- reply {ms to its end, WarmPrompt (msgpack)}; {} where there is none
local function warm_take(keys, argv)
  local tag, model, now = keys[1], argv[2], now_ms()
  for i = 3, #argv, 3 do
    local key, tokens, used = tag .. ':warmth:' .. model .. ':' .. argv[i], argv[i + 1], argv[i + 2]
    local sums = add_to(key, {'tokens', tokens, 'used', used})
    if sums[1] == tonumber(tokens) then redis.call('PEXPIRE', key, 3600 * 1000) end
    totals.add(tag, model, 'warmed_tokens_total', tokens)
    totals.add(tag, model, 'warmed_tokens_used_total', used)
  end
  local paused = pauses.find(tag, model)
  while true do
    local packed = redis.call('LPOP', tag .. ':warm:' .. argv[1])
    if not packed then return {} end
    local entry = try(cmsgpack.unpack, packed)
    local tenant, lane, end_ms, prompt = unpack(type(entry) == 'table' and entry or {})
    if now < (tonumber(end_ms) or 0) and not pauses.hold(paused, lane, tenant) then
      return {end_ms - now, prompt}
    end
  end
end

register('warm_take', warm_take, 'allow-oom')
