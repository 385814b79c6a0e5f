-- outbox_take: leases due messages to a relay. Destinations take turns and each has a limit of messages
-- in flight, so that a slow destination delays no other.
-- KEYS  1 tag
-- ARGV  1 lease (ms)  2 messages at most  3 messages in flight to one destination at most
-- reply list of {job id, attempt}
local MAX_DESTINATIONS = 100  -- checked in one call

-- Makes messages due again whose lease has lapsed.
local function requeue_lapsed_attempts(tag, to, now)
  local in_flight = tag .. ':flying:' .. to
  for _, id in ipairs(redis.call('ZRANGE', in_flight, '-inf', now, 'BYSCORE')) do
    redis.call('ZREM', in_flight, id)
    if redis.call('EXISTS', tag .. ':out:' .. id) == 1 then
      redis.call('HSET', tag .. ':out:' .. id, 'state', 'due')
      redis.call('ZADD', tag .. ':due:' .. to, now, id)
    end
  end
end

local function take_one(tag, to, id, until_ms)
  local key = tag .. ':out:' .. id
  redis.call('ZREM', tag .. ':due:' .. to, id)
  local record = redis.call('HMGET', key, 'number', 'tenant', 'kind', 'to')
  local number, tenant, kind = unpack(record)
  if not number then return nil end  -- the record has expired
  if not tenant or not kind or record[4] ~= to then  -- malformed: no attempt could be reported
    redis.call('DEL', key)
    redis.call('HINCRBY', tag .. ':deliveries', 'dead', 1)
    return nil
  end
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'state', 'taken', 'taken', number)
  redis.call('ZADD', tag .. ':flying:' .. to, until_ms, id)
  return {id, attempt}
end

local function outbox_take(keys, argv)
  local tag, now = keys[1], now_ms()
  local lease_ms, room, cap = tonumber(argv[1]), tonumber(argv[2]), tonumber(argv[3])
  local taken = {}
  local destinations = redis.call('ZRANGE', tag .. ':outbox', '-inf', now, 'BYSCORE', 'LIMIT', 0,
    MAX_DESTINATIONS)
  for _, to in ipairs(destinations) do
    requeue_lapsed_attempts(tag, to, now)
    local free = math.min(cap - redis.call('ZCARD', tag .. ':flying:' .. to), room - #taken)
    if free > 0 then
      local ids = redis.call('ZRANGE', tag .. ':due:' .. to, '-inf', now, 'BYSCORE', 'LIMIT', 0,
        free)
      for _, id in ipairs(ids) do
        table.insert(taken, take_one(tag, to, id, now + lease_ms))
      end
    end
    outbox.reschedule(tag, to, now, cap)
    if #taken >= room then break end
  end
  return taken
end

register('outbox_take', outbox_take, 'allow-oom')
