-- Operations on many jobs, as far as several functions use them. The hash `operation:<id>` holds kind,
-- filters, counts, the lease of the gateway that works on it, and `cursor`, how far it is: msgpack
-- {created, id} (_filters.lua), or AT_END.
-- requires shared

local OPERATION_MS = 8 * 86400 * 1000  -- that an operation is listed
local OPEN_MS = 86400 * 1000  -- after which one that waits for room is given up
local ENDED_MS = OPERATION_MS - OPEN_MS
local AT_END = 'end'

function operations.finish(tag, id, state, now)
  local key = tag .. ':operation:' .. id
  redis.call('HSET', key, 'state', state, 'finished', now)
  redis.call('PEXPIRE', key, ENDED_MS)
  redis.call('ZREM', tag .. ':operations_open', id)
end
