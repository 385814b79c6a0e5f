-- outbox_replay: schedules a dead letter for delivery again, with a new series of attempts.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant
-- reply {'OK'}   {'NOT_FOUND'} no such record of the tenant
--       {state} it is not dead: due, taken, idle, delivered
local function outbox_replay(keys, argv)
  local tag, id, now = keys[1], argv[1], now_ms()
  local key = tag .. ':out:' .. id
  local record = redis.call('HMGET', key, 'state', 'tenant', 'to')
  if record[2] ~= argv[2] then return {'NOT_FOUND'} end
  if record[1] ~= 'dead' then return {record[1]} end
  redis.call('HSET', key, 'state', 'due', 'failures', 0)
  redis.call('PEXPIRE', key, OUTBOX_KEEP_MS)
  redis.call('ZREM', tag .. ':dead:' .. argv[2], id)
  redis.call('ZADD', tag .. ':due:' .. record[3], now, id)
  outbox.wake(tag, record[3], now)
  return {'OK'}
end

register('outbox_replay', outbox_replay, 'allow-oom')
