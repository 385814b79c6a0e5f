-- batch_take: leases unfinished batches that no feeder holds: of the tenant with the fewest that are
-- held first, then with the earliest end of their window; none in progress whose start is to come. Of
-- many open ones it looks at MAX_LOOKS in a row, which the token draws.
-- `batches_fed` tells for an hour that there is a feeder.
-- KEYS  1 tag
-- ARGV  1 token of the lease  2 lease (ms)  3 '1': batches in progress; '0': those in other states
--       4 batches at most  5 more of them at most, of tenants of which none is held
--       6 … tenants, each with a window's end (ms): one more at most, of such a tenant, that ends before
-- reply list of batch ids; a repeated call has those of the call before
local FED_MS = 3600000
local MAX_LOOKS = 256

local function in_turns(waiting, held)
  table.sort(waiting, function(a, b)
    if a.expires ~= b.expires then return a.expires < b.expires end
    return a.age < b.age
  end)
  for rank, batch in ipairs(waiting) do
    batch.rank, batch.turn = rank, held[batch.tenant] or 0
    held[batch.tenant] = batch.turn + 1
  end
  table.sort(waiting, function(a, b)
    if a.turn ~= b.turn then return a.turn < b.turn end
    return a.rank < b.rank
  end)
end

local function batch_take(keys, argv)
  local tag, now = keys[1], now_ms()
  local most, more, last_ends = tonumber(argv[4]), tonumber(argv[5]), {}
  for i = 6, #argv, 2 do last_ends[argv[i]] = tonumber(argv[i + 1]) end
  local told = tonumber(redis.call('GET', tag .. ':batches_fed') or 0) or 0
  if now - told > FED_MS / 2 then  -- not with each poll
    redis.call('SET', tag .. ':batches_fed', now, 'PX', FED_MS)
  end
  local taken, waiting, held = {}, {}, {}
  local function take(id)
    redis.call('HSET', tag .. ':batch:' .. id, 'token', argv[1], 'lease', now + tonumber(argv[2]))
    table.insert(taken, id)
  end
  if most + more == 0 and #argv == 5 then return taken end
  local num_open, last = redis.call('ZCARD', tag .. ':batches_open'), MAX_LOOKS - 1
  local drawn = tonumber(string.sub(server().sha1hex(argv[1]), 1, 8), 16)
  if num_open > MAX_LOOKS then last = drawn % (num_open + MAX_LOOKS - 1) end
  for _, id in ipairs(redis.call('ZRANGE', tag .. ':batches_open', math.max(0, last - MAX_LOOKS + 1), last)) do
    local status, tenant, token, lease, start, expires = unpack(redis.call('HMGET',
      tag .. ':batch:' .. id, 'status', 'tenant', 'token', 'lease', 'start', 'expires'))
    local waits = status == 'in_progress' and (whole_number(start or 0) or 0) > now
    if not status then
      redis.call('ZREM', tag .. ':batches_open', id)
    elseif (status == 'in_progress') == (argv[3] == '1') and not waits then
      if token == argv[1] then
        take(id)
      elseif (whole_number(lease) or 0) > now then
        held[tenant] = (held[tenant] or 0) + 1
      else
        table.insert(waiting, {id = id, tenant = tenant, age = #waiting,
          expires = whole_number(expires or 0) or 0})
      end
    end
  end
  in_turns(waiting, held)
  for _, batch in ipairs(waiting) do
    local ends_before = batch.expires < (last_ends[batch.tenant] or 0)
    local beyond = ends_before and 1 or batch.turn == 0 and more or 0
    if #taken < most + beyond then take(batch.id) end
  end
  return taken
end

register('batch_take', batch_take, 'allow-oom')
