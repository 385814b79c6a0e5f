-- move: begins or ends the move of a tenant (partition 0 alone knows it). In between its old home calls
-- `depart` and its new one `settle`; who finds a move that has begun repeats all that follows.
-- KEYS  1 tag of partition 0
-- ARGV  1 tenant  2 the new home; '': end the move  3 of the end: the move's version
-- reply {version, 'in' | 'moving', partitions}   now; where a move is under way, that one goes on
--       {'NOT_FOUND'}                            the tenant is not known, or no such partition is active
local function move(keys, argv)
  local tag, tenant, target = keys[1], argv[1], argv[2]
  local known = redis.call('HGET', tag .. ':homes', tenant)
  if not known then return {'NOT_FOUND'} end
  local version, state, path = string.match(known, '^(%d+) (%a+) (%S+)$')
  local last = string.match(path, '%d+$')
  if target == '' then
    if state == 'moving' and version == argv[3] then state = 'in' end
  elseif state == 'in' and last ~= target then
    local partition = redis.call('HGET', tag .. ':partitions', target)
    if not string.find(partition or '', ' active') then return {'NOT_FOUND'} end
    local others = {}
    for number in string.gmatch(path, '%d+') do
      if number ~= target then table.insert(others, number) end
    end
    table.insert(others, target)
    version, state, path = version + 1, 'moving', table.concat(others, ',')
  end
  redis.call('HSET', tag .. ':homes', tenant, string.format('%d %s %s', version, state, path))
  return {tonumber(version), state, path}
end

register('move', move, 'allow-oom')
