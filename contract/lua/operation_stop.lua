-- operation_stop: ends an operation where it is. What it has done stays done.
-- KEYS  1 tag
-- ARGV  1 operation id
-- reply {state} afterwards   {'NOT_FOUND'}
local function operation_stop(keys, argv)
  local tag, id = keys[1], argv[1]
  local state = redis.call('HGET', tag .. ':operation:' .. id, 'state')
  if not state then return {'NOT_FOUND'} end
  if state ~= 'running' then return {state} end
  operations.finish(tag, id, 'cancelled', now_ms())
  return {'cancelled'}
end

register('operation_stop', operation_stop, 'allow-oom')
