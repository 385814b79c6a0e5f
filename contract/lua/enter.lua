-- enter: counts a call in its tenant's meter of requests before anything is done for it. submit gives it
-- back where it does not accept the call (is_counted).
-- KEYS  1 tag
-- ARGV  1 tenant  2 requests_per_min  3 tokens_per_min (its limits; 0: none)
-- reply {ms until a retry may succeed (0: it is counted), rates (as submit)}
local function enter(keys, argv)
  local tag, now = keys[1], now_ms()
  local limits = {requests_per_min = tonumber(argv[2]), tokens_per_min = tonumber(argv[3])}
  local tenant = admission.tenant(tag, argv[1], limits, now)
  local retry_ms = admission.requests_ms(tenant, limits)
  if retry_ms == 0 then admission.count_request(tag, argv[1], tenant, 1, limits, now) end
  return {retry_ms, admission.rates(tenant, limits)}
end

register('enter', enter, 'allow-oom')
