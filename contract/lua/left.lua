-- left: what tenants that moved away have left in this partition; writes nothing.
-- KEYS  1 tag
-- ARGV  1… tenants
-- reply {{version in which the tenant departed, reserved tokens, stored bytes, late}, …}
local function left(keys, argv)
  local found = {}
  for i, tenant in ipairs(argv) do found[i] = homes.left(keys[1], tenant) end
  return found
end

register('left', left, 'no-writes')
