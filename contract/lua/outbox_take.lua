-- outbox_take: leases due messages to a relay, one at a time. Tenants take turns, and the destinations of
-- a tenant. A destination has a limit of messages in flight, so that a slow one delays no other. However
-- many destinations a tenant names, it gets another message only while those that it has in flight are
-- at most TIMES_FREE times the places that remain, as in _memory.lua: one is left for who comes next.
-- KEYS  1 tag
-- ARGV  1 lease (ms)  2 messages at most: the relay's free places  3 messages in flight to one destination at most
-- reply list of {job id, attempt}
local MAX_TENANTS, MAX_DESTINATIONS = 256, 64  -- checked in one call

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

local function take_one(tag, tenant, to, id, lease_ms, now)
  local key = tag .. ':out:' .. id
  redis.call('ZREM', tag .. ':due:' .. to, id)
  local record = redis.call('HMGET', key, 'number', 'tenant', 'kind', 'to')
  local number, owner, kind = unpack(record)
  if not number then return nil end  -- the record has expired
  if owner ~= tenant or not kind or record[4] ~= to then  -- malformed: no attempt could be reported
    redis.call('DEL', key)
    redis.call('HINCRBY', tag .. ':deliveries', 'dead', 1)
    return nil
  end
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'state', 'taken', 'taken', number)
  outbox.lease(tag, tenant, to, id, lease_ms, now)
  return {id, attempt}
end

-- Takes one due message of a tenant, of at most so many destinations; nil where it has none, or they are full.
-- Returns also how many more may be checked.
local function take_of_tenant(tag, tenant, lease_ms, cap, now, looks)
  local destinations = redis.call('ZRANGE', tag .. ':due:of:' .. tenant, '-inf', now, 'BYSCORE', 'LIMIT', 0,
    looks)
  for _, to in ipairs(destinations) do
    looks = looks - 1
    requeue_lapsed_attempts(tag, to, now)
    local found, id
    repeat
      id = redis.call('ZCARD', tag .. ':flying:' .. to) < cap
        and redis.call('ZRANGE', tag .. ':due:' .. to, '-inf', now, 'BYSCORE', 'LIMIT', 0, 1)[1]
      found = id and take_one(tag, tenant, to, id, lease_ms, now)
    until found or not id
    outbox.reschedule(tag, tenant, to, now, cap)
    if found then return found, looks end
  end
  return nil, looks
end

-- Whether a tenant may have one more message in flight, with so many free places.
local function may_take(tag, tenant, free, now)
  local flying = outbox.flying_of(tag, tenant)
  redis.call('ZREMRANGEBYSCORE', flying, '-inf', now)
  local num_flying = redis.call('ZCARD', flying)
  return free > 0 and (num_flying == 0 or num_flying + 1 <= TIMES_FREE * (free - 1))
end

-- Gives a destination that an earlier version has scheduled among tenants to its tenant.
local function adopt(tag, to, now)
  redis.call('ZREM', tag .. ':outbox', to)
  for _, kind in ipairs({':due:', ':flying:'}) do
    for _, id in ipairs(redis.call('ZRANGE', tag .. kind .. to, 0, MAX_DESTINATIONS - 1)) do
      local tenant = redis.call('HGET', tag .. ':out:' .. id, 'tenant')
      if tenant then return outbox.wake(tag, tenant, to, now) end
    end
  end
end

local function outbox_take(keys, argv)
  local tag, now = keys[1], now_ms()
  local lease_ms, room, cap = tonumber(argv[1]), tonumber(argv[2]), tonumber(argv[3])
  local taken, tenants, looks, num_before = {}, {}, MAX_DESTINATIONS, nil
  for _, tenant in ipairs(redis.call('ZRANGE', tag .. ':outbox', '-inf', now, 'BYSCORE', 'LIMIT', 0,
    MAX_TENANTS)) do
    local is_tenant = redis.call('EXISTS', tag .. ':due:of:' .. tenant) == 1
    if is_tenant then table.insert(tenants, tenant) else adopt(tag, tenant, now) end
  end
  repeat
    num_before = #taken
    for _, tenant in ipairs(tenants) do
      if looks == 0 or #taken == room then return taken end
      if may_take(tag, tenant, room - #taken, now) then
        taken[#taken + 1], looks = take_of_tenant(tag, tenant, lease_ms, cap, now, looks)
      end
    end
  until #taken == num_before
  return taken
end

register('outbox_take', outbox_take, 'allow-oom')
