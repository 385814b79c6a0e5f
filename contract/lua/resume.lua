-- resume: ends a pause; see _pauses.lua. What waits is claimed again, in order.
-- KEYS  1 tag
-- ARGV  1 model  2 lane  3 tenant ('*' each: all)  4 by whom: 'operator' or 'tenant'
-- reply {'OK'}   {'NOT_FOUND'} there is no such pause
--       {'DENIED'}  the operator's, which a tenant may not end
local function resume(keys, argv)
  local tag, key = keys[1], keys[1] .. ':paused'
  local field = argv[1] .. ' ' .. argv[2] .. ' ' .. argv[3]
  local by = string.match(redis.call('HGET', key, field) or '', '(%S+)$')
  if not by then return {'NOT_FOUND'} end
  if by == 'operator' and argv[4] ~= 'operator' then return {'DENIED'} end
  redis.call('HDEL', key, field)
  local models = argv[1] == '*' and redis.call('SMEMBERS', tag .. ':models') or {argv[1]}
  for _, model in ipairs(models) do redis.call('PUBLISH', tag .. ':wake:' .. model, argv[2]) end
  return {'OK'}
end

register('resume', resume, 'allow-oom')
