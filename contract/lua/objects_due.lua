-- objects_due: files and batches whose objects are to be deleted; writes nothing.
-- KEYS  1 tag
-- ARGV  1 ids at most
-- reply list of ids, the longest due first
local function objects_due(keys, argv)
  local due = keys[1] .. ':objects_due'
  return redis.call('ZRANGE', due, '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, argv[1])
end

register('objects_due', objects_due, 'no-writes')
