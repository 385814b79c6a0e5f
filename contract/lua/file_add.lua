-- file_add: records a file whose content the object store holds.
-- KEYS  1 tag
-- ARGV  1 file id  2 tenant  3 bytes  4 purpose  5 filename  6 ms until it expires
--       7 bytes that the tenant's files may have in all (0: no limit)
-- reply {'OK', created (ms), expires (ms)}  recorded, now or before; it has these bytes now
--       {'FULL', bytes}                     of the tenant's files without this one
local function file_add(keys, argv)
  local tag, id, tenant, now = keys[1], argv[1], argv[2], now_ms()
  local key = tag .. ':file:' .. id
  local bytes, most = tonumber(argv[3]), tonumber(argv[7])
  local known = redis.call('HMGET', key, 'created', 'expires', 'bytes')
  if known[1] then  -- a batch's results may be written again, with other parts
    redis.call('HSET', key, 'bytes', bytes)
    redis.call('HINCRBY', tag .. ':file_bytes', tenant, bytes - (whole_number(known[3]) or 0))
    return {'OK', whole_number(known[1]) or 0, whole_number(known[2]) or 0}
  end
  local held = whole_number(redis.call('HGET', tag .. ':file_bytes', tenant)) or 0
  if most > 0 and held + bytes > most then return {'FULL', held} end
  local expires = now + tonumber(argv[6])
  redis.call('HSET', key, 'tenant', tenant, 'bytes', bytes, 'purpose', argv[4],
    'filename', argv[5], 'created', now, 'expires', expires)
  redis.call('HINCRBY', tag .. ':file_bytes', tenant, bytes)
  redis.call('ZADD', tag .. ':files:' .. tenant, now, id)
  redis.call('ZADD', tag .. ':objects_due', expires, id)
  return {'OK', now, expires}
end

redis.register_function('batchway_v1_file_add', file_add)
