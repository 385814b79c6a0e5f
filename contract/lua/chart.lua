-- chart: changes the map of partitions (partition 0 alone has it). The hash `partitions` has `version` and
-- for each partition `<weight> <active | draining>[ <share of the bounds>]`; `shared_ms`: when shares changed.
-- KEYS  1 tag of partition 0
-- ARGV  1 version of the map that the caller knows (0: none)
--       then 2 for each partition: number, its text; '': it is removed; or `shared_ms` and a time
-- reply {'OK', version}
--       {'STALE', version}   another caller has changed it
--       {'IN_USE', number}   it is the home of a tenant, or the only partition
-- The first map makes all tenants that have jobs residents of partition 0.
local function begin(tag)
  local fields, most = {'', '1'}, 1000
  for _, tenant in ipairs(filters.tenants(tag)) do
    if redis.call('HSETNX', tag .. ':homes', tenant, '1 in 0') == 1 then
      fields[#fields + 1], fields[#fields + 2] = tenant, '1 in'
    end
  end
  for i = 1, #fields, most do
    redis.call('HSET', tag .. ':residents', unpack(fields, i, math.min(#fields, i + most - 1)))
  end
end

local function in_use(tag, number)
  if number == '0' then return true end  -- the map is in it
  local known = redis.call('HGETALL', tag .. ':homes')
  for i = 2, #known, 2 do
    if string.match(known[i], '%d+$') == number then return true end
  end
end

local function chart(keys, argv)
  local tag = keys[1]
  local key = tag .. ':partitions'
  local version = tonumber(redis.call('HGET', key, 'version') or 0) or 0
  if version ~= tonumber(argv[1]) then return {'STALE', version} end
  for i = 2, #argv, 2 do
    if argv[i + 1] == '' and in_use(tag, argv[i]) then return {'IN_USE', argv[i]} end
  end
  if version == 0 then begin(tag) end
  redis.call('HSET', key, 'version', version + 1, unpack(argv, 2))
  for i = 2, #argv, 2 do
    if argv[i + 1] == '' then redis.call('HDEL', key, argv[i]) end
  end
  return {'OK', version + 1}
end

register('chart', chart, 'allow-oom')
