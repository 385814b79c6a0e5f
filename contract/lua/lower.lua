-- lower: what a tenant has left in another partition has become less, by `left` there. Only lowers bounds,
-- and moves what has ended there into the tenant's meter of tokens once.
-- KEYS  1 tag
-- ARGV  1 tenant  2 the other partition  3 reserved tokens  4 stored bytes  5 late ('': unknown)
-- reply {reserved tokens, stored bytes}   now; {0, 0}: nothing is left
local function lower(keys, argv)
  local tag, tenant, other = keys[1], argv[1], argv[2]
  local known = homes.away(tag, tenant, other)
  if not known then return {0, 0} end
  local now = {math.min(known[1], tonumber(argv[3])), math.min(known[2], tonumber(argv[4])), known[3]}
  local _, is_in = homes.resident(tag, tenant)
  local late = tonumber(argv[5])
  if is_in and late then
    homes.add_late(tag, tenant, late - known[3])
    now[3] = late
  end
  homes.set_away(tag, tenant, other, now)
  return {now[1], now[2]}
end

register('lower', lower, 'allow-oom')
