-- cancel: ends a queued or running job for its caller at once; its worker is fenced.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant
-- reply {'CANCELLED'} by this call   {status} it had ended before
--       {'NOT_FOUND'} no such job of the tenant
local function cancel(keys, argv)
  local tag = keys[1]
  local job = load_job(tag, argv[1])
  if not job or job.tenant ~= argv[2] then return {'NOT_FOUND'} end
  if TERMINAL[job.state] then return {job.state} end
  terminate(tag, job, 'cancelled', now_ms())
  return {'CANCELLED'}
end

register('cancel', cancel, 'allow-oom')
