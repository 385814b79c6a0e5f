-- outbox_start: begins a delivery attempt or renews its lease. An attempt delivers the newest message
-- at its beginning.
-- KEYS  1 tag
-- ARGV  1 job id  2 attempt  3 lease (ms)  4 'begin' | 'renew'
-- reply {'OK', {field, value, …}}  the outbox record
--       {'FENCED'}                 the attempt is over, or another has begun
--       {'GONE'}                   no such record
local function outbox_start(keys, argv)
  local tag, id = keys[1], argv[1]
  local key = tag .. ':out:' .. id
  local record = redis.call('HMGET', key, 'state', 'attempt', 'number', 'to', 'tenant')
  if not record[1] or not record[5] then return {'GONE'} end
  if record[1] ~= 'taken' or record[2] ~= argv[2] then return {'FENCED'} end
  if argv[4] == 'begin' then redis.call('HSET', key, 'taken', record[3]) end
  outbox.lease(tag, record[5], record[4], id, tonumber(argv[3]), now_ms())
  return {'OK', redis.call('HGETALL', key)}
end

register('outbox_start', outbox_start, 'allow-oom')
