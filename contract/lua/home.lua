-- home: the home of a tenant (partition 0 alone knows it); chooses one for a new tenant.
-- KEYS  1 tag of partition 0
-- ARGV  1 tenant  2 partition for a new tenant  3 version of the map by which it was chosen
-- reply {version, 'in' | 'moving', partitions (`1,0`: the last is the home)}
--       {'STALE'}   the map has changed: read it again
local function home(keys, argv)
  local tag, tenant, chosen = keys[1], argv[1], argv[2]
  local known = redis.call('HGET', tag .. ':homes', tenant)
  if not known then
    local map = redis.call('HMGET', tag .. ':partitions', 'version', chosen)
    if map[1] ~= argv[3] or not string.find(map[2] or '', ' active') then return {'STALE'} end
    known = '1 in ' .. chosen
    redis.call('HSET', tag .. ':homes', tenant, known)
  end
  local version, state, path = string.match(known, '^(%d+) (%a+) (%S+)$')
  return {tonumber(version), state, path}
end

register('home', home, 'allow-oom')
