-- Which jobs a list or an operation means, and in which order they are read: the youngest first, of those
-- of one time the greatest id first; or, for a list, the reverse. A cursor {created, id} is a place in that
-- order: behind this id or, where it is '', behind all of that time.
-- requires shared

-- Filters as `Wanted` of contract/function_types.py packs them; what is missing admits all.
function filters.unpack(packed)
  local filter = cmsgpack.unpack(packed)
  for _, name in ipairs({'states', 'lanes'}) do
    local set = filter[name] and #filter[name] > 0 and {} or nil
    for _, word in ipairs(filter[name] or {}) do set[word] = true end
    filter[name] = set
  end
  filter.since, filter.before = filter.since or 0, filter.before or 0
  return filter
end

-- Whether a record {state, lane, model, code} and its metadata (msgpack) match. The caller checks times.
function filters.match(filter, record, metadata)
  local state, lane, model, code = unpack(record)
  if filter.states and not filter.states[state] then return false end
  if filter.lanes and not filter.lanes[lane] then return false end
  if filter.model and filter.model ~= model then return false end
  if filter.code and filter.code ~= code then return false end
  if not filter.metadata or not next(filter.metadata) then return true end
  local known = metadata and metadata ~= '' and cmsgpack.unpack(metadata) or {}
  for name, value in pairs(filter.metadata) do
    if known[name] ~= value then return false end
  end
  return true
end

function filters.is_before(a, b)
  if a.created ~= b.created then return a.created > b.created end
  return a.id > b.id
end

-- Up to `most` ids of a sorted set behind a cursor (nil: from the first), {{id, created}, …}, and whether
-- there may be more. `is_ascending`: the oldest first.
function filters.rows(key, cursor, most, is_ascending)
  local rank = cursor and redis.call(is_ascending and 'ZRANK' or 'ZREVRANK', key, cursor.id)
  local from = cursor and string.format(cursor.id == '' and '%.0f' or '(%.0f', cursor.created)
  local first = rank and rank + 1 or cursor
    and redis.call('ZCOUNT', key, is_ascending and '-inf' or from, is_ascending and from or '+inf') or 0
  local rows = {}
  while true do
    local found = redis.call(is_ascending and 'ZRANGE' or 'ZREVRANGE', key, first, first + most - 1,
      'WITHSCORES')
    for i = 1, #found, 2 do
      local row = {id = found[i], created = tonumber(found[i + 1])}
      local a, b = cursor, row
      if is_ascending then a, b = row, cursor end
      if not cursor or filters.is_before(a, b) then table.insert(rows, row) end
    end
    if #rows > 0 or #found < 2 * most then return rows, #found == 2 * most end
    first = first + most  -- all are of the cursor's time, but before it
  end
end

-- The tenants with kept jobs.
function filters.tenants(tag)
  local tenants, sums = {}, redis.call('HGETALL', tag .. ':stored:tenants')
  for i = 1, #sums, 2 do
    if sums[i] ~= '' then table.insert(tenants, sums[i]) end
  end
  return tenants
end
