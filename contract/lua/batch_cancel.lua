-- batch_cancel: has a batch's feeder end it, with what is finished.
-- KEYS  1 tag
-- ARGV  1 batch id  2 tenant
-- reply {'OK', status}  cancelling, or the status that no cancel changes any more
--       {'NOT_FOUND'}   no such batch of the tenant
local function batch_cancel(keys, argv)
  local key = keys[1] .. ':batch:' .. argv[1]
  local record = redis.call('HMGET', key, 'status', 'tenant')
  local status = record[1]
  if not status or record[2] ~= argv[2] then return {'NOT_FOUND'} end
  if status == 'validating' or status == 'in_progress' then
    status = 'cancelling'
    redis.call('HSET', key, 'status', status, 'cancelling_at', now_ms())
  end
  return {'OK', status}
end

register('batch_cancel', batch_cancel, 'allow-oom')
