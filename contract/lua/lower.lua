-- lower: what a tenant has left in another partition has become less, by `left` there. Only lowers bounds,
-- and moves what has ended there into the tenant's meter of tokens once.
-- KEYS  1 tag
-- ARGV  1 tenant  2 the other partition  3 version in which it departed from there  4 reserved tokens
--       5 stored bytes  6 late
-- reply {reserved tokens, stored bytes}   now; {0, 0}: nothing is left
local function lower(keys, argv)
  local tag, tenant, other = keys[1], argv[1], argv[2]
  local known = homes.away(tag, tenant, other)
  if not known then return {0, 0} end
  -- Of another stay; or the tenant has departed, and its next home gets what was known then.
  local _, is_in = homes.resident(tag, tenant)
  if known[1] ~= tonumber(argv[3]) or not is_in then return {known[2], known[3]} end
  local now = {known[1], math.min(known[2], tonumber(argv[4])), math.min(known[3], tonumber(argv[5])), known[4]}
  local number, sum = homes.late(argv[6])
  local known_number, known_sum = homes.late(known[4])
  if number > known_number then
    homes.add_late(tag, tenant, sum - known_sum)
    now[4] = argv[6]
  end
  homes.set_away(tag, tenant, other, now)
  return {now[2], now[3]}
end

register('lower', lower, 'allow-oom')
