-- delete: deletes an ended job for its caller: record, log, entry in the tenant's list. Its objects in
-- the object store become orphaned; a process with access to the store deletes them.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant
-- reply {'DELETED'}   {status} it has not ended   {'NOT_FOUND'} no such job of the tenant
local function delete(keys, argv)
  local tag = keys[1]
  local job = load_job(tag, argv[1])
  if not job or job.tenant ~= argv[2] then return {'NOT_FOUND'} end
  if not TERMINAL[job.state] then return {job.state} end
  forget(tag, job.id, job.tenant, job.has_objects, kept_entry(job))
  return {'DELETED'}
end

register('delete', delete, 'allow-oom')
