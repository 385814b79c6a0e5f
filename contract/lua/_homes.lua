-- Where tenants live. A tenant is admitted by one partition at a time, its home. Partition 0 says which:
-- the hash `homes` has `<version> <in | moving> <partition,…>` of each tenant, where the last partition is
-- its home (while it moves: to be) and the others hold what it left behind. The home itself holds the right
-- to admit: its hash `residents` has `<version> <in | out>`, and the field '' where there are several
-- partitions. Versions only grow, so a late call changes nothing. tests/oracle/reference_homes.py is the
-- same in Python.
--
-- What a tenant left behind counts at its home until it is gone: the hash `away` has
-- `<version> <reserved tokens> <stored bytes> <late>` for each `<partition> <tenant>`, with the version in
-- which it departed from there, and the record of the tenant the sums `away` and `away_bytes`. `late`,
-- `<number>:<sum>`, is what the ends of its jobs there have added to its meter of tokens since, as far as
-- the meter here has it.

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

-- {number, sum} of a text `late`.
function homes.late(text)
  local number, sum = string.match(text or '', '^(%d+):(%S+)$')
  return tonumber(number or 0), tonumber(sum or 0) or 0
end

-- Called where a job adds to a tenant's meter of tokens: a new home of the tenant must hear of it.
function homes.note_late(tag, tenant, more)
  local version, is_in = homes.resident(tag, tenant)
  if version > 0 and not is_in then
    local key = tag .. ':tenant:' .. tenant
    local number, sum = homes.late(redis.call('HGET', key, 'late'))
    redis.call('HSET', key, 'late', string.format('%d:%.17g', number + 1, sum + more))
  end
end

-- What a tenant has in this partition: {version, reserved tokens, stored bytes, late}.
function homes.left(tag, tenant)
  local found = redis.call('HMGET', tag .. ':tenant:' .. tenant, 'reserved', 'late')
  local stored = redis.call('HGET', tag .. ':stored:tenants', tenant)
  local version = homes.resident(tag, tenant)
  return {version, math.max(0, whole_number(found[1] or 0) or 0),
    math.max(0, whole_number(stored or 0) or 0), found[2] or '0:0'}
end

-- The same of another partition, as this one knows it; nil: nothing is there.
function homes.away(tag, tenant, other)
  local text = redis.call('HGET', tag .. ':away', other .. ' ' .. tenant) or ''
  local version, tokens, bytes, late = string.match(text, '^(%d+) (%d+) (%d+) (%S+)$')
  return version and {tonumber(version), tonumber(tokens), tonumber(bytes), late} or nil
end

-- The partitions in which a tenant has something, as this one knows it.
function homes.others(tag, tenant)
  local found, known = {}, redis.call('HGETALL', tag .. ':away')
  for i = 1, #known, 2 do
    local other, name = string.match(known[i], '^(%d+) (.*)$')
    if name == tenant then table.insert(found, other) end
  end
  return found
end

-- Sets what a tenant has in another partition; nil: nothing.
function homes.set_away(tag, tenant, other, left)
  local field, key = other .. ' ' .. tenant, tag .. ':tenant:' .. tenant
  local before, now = homes.away(tag, tenant, other) or {0, 0, 0}, left or {0, 0, 0}
  local tokens = redis.call('HINCRBY', key, 'away', now[2] - before[2])
  local bytes = redis.call('HINCRBY', key, 'away_bytes', now[3] - before[3])
  if now[2] == 0 and now[3] == 0 then
    redis.call('HDEL', tag .. ':away', field)
  else
    redis.call('HSET', tag .. ':away', field, string.format('%d %d %d %s', unpack(now)))
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
