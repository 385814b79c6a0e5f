-- Where tenants live. A tenant is admitted by one partition at a time, its home. Partition 0 says which:
-- the hash `homes` has `<version> <in | moving> <partition,…>` of each tenant, where the last partition is
-- its home (while it moves: to be) and the others hold what it left behind. The home itself holds the right
-- to admit: its hash `residents` has `<version> <in | out>`, and the field '' where there are several
-- partitions. Versions only grow, so a late call changes nothing. tests/oracle/reference_homes.py is the
-- same in Python.
--
-- What a tenant left behind counts at its home until it is gone: the hash `away` has
-- `<reserved tokens> <stored bytes> <late>` for each `<partition> <tenant>`, and the record of the tenant
-- the sums `away` and `away_bytes`. `late`: what ends of its jobs there have added to its meter of tokens
-- since it left, as far as the meter here has it.

-- Whether a partition may not admit a tenant whose home a gateway believes it to be, in `version`; 0: the
-- gateway knows one partition.
function homes.is_elsewhere(tag, tenant, version)
  local known = redis.call('HMGET', tag .. ':residents', '', tenant)
  if not known[1] then return version ~= 0 end
  return known[2] ~= string.format('%d in', version)
end

-- {version, is_in} of a tenant in this partition.
function homes.resident(tag, tenant)
  local text = redis.call('HGET', tag .. ':residents', tenant) or ''
  local version, state = string.match(text, '^(%d+) (%a+)$')
  return tonumber(version or 0), state == 'in'
end

-- Called where a job adds to a tenant's meter of tokens: a new home of the tenant must hear of it.
function homes.note_late(tag, tenant, more)
  local version, is_in = homes.resident(tag, tenant)
  if version > 0 and not is_in then
    local key = tag .. ':tenant:' .. tenant
    local late = tonumber(redis.call('HGET', key, 'late') or 0) or 0
    redis.call('HSET', key, 'late', string.format('%.17g', late + more))
  end
end

-- {reserved tokens, stored bytes, late ('': nothing is known)} of a tenant in this partition.
function homes.left(tag, tenant)
  local found = redis.call('HMGET', tag .. ':tenant:' .. tenant, 'reserved', 'late')
  local stored = redis.call('HGET', tag .. ':stored:tenants', tenant)
  return {math.max(0, whole_number(found[1] or 0) or 0), math.max(0, whole_number(stored or 0) or 0),
    tonumber(found[2]) and found[2] or ''}
end

-- {tokens, bytes, late} of a tenant in another partition, as this one knows it; nil: nothing is there.
function homes.away(tag, tenant, other)
  local text = redis.call('HGET', tag .. ':away', other .. ' ' .. tenant) or ''
  local tokens, bytes, late = string.match(text, '^(%d+) (%d+) (%S+)$')
  return tokens and {tonumber(tokens), tonumber(bytes), tonumber(late) or 0} or nil
end

-- Sets what a tenant has in another partition; {0, 0, …}: nothing.
function homes.set_away(tag, tenant, other, left)
  local field, key = other .. ' ' .. tenant, tag .. ':tenant:' .. tenant
  local before = homes.away(tag, tenant, other) or {0, 0, 0}
  local tokens = redis.call('HINCRBY', key, 'away', left[1] - before[1])
  local bytes = redis.call('HINCRBY', key, 'away_bytes', left[2] - before[2])
  if left[1] == 0 and left[2] == 0 then
    redis.call('HDEL', tag .. ':away', field)
  else
    redis.call('HSET', tag .. ':away', field, string.format('%d %d %.17g', left[1], left[2], left[3]))
  end
  if tokens > 0 or bytes > 0 then
    redis.call('PERSIST', key)
  elseif (whole_number(redis.call('HGET', key, 'reserved') or 0) or 0) <= 0 then
    ledger.expire_tenant(key)
  end
end

-- Adds to a tenant's meter of tokens without its limit: the level sinks when it is next read.
function homes.add_late(tag, tenant, more)
  if more == 0 then return end
  local key = tag .. ':tenant:' .. tenant
  local level = tonumber(redis.call('HGET', key, 'tokens') or 0) or 0
  redis.call('HSET', key, 'tokens', string.format('%.17g', level + more))
end
