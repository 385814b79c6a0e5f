-- Operations on many jobs, as far as several functions use them. The hash `operation:<id>` holds kind,
-- filters, counts, the lease of the gateway that works on it, and `cursor`, how far it is: msgpack
-- {tenant, created, id}, the tenants in the order of their names; '' as tenant: at the end.

local OPERATION_MS = 8 * 86400 * 1000  -- that an operation is listed
local OPEN_MS = 86400 * 1000  -- after which one that waits for room is given up
local ENDED_MS = OPERATION_MS - OPEN_MS

local operations = {}

-- The first tenant, by name, after a name; '' where there is none.
local function next_tenant(tag, name)
  local found = ''
  for _, tenant in ipairs(filters.tenants(tag)) do
    if tenant > name and (found == '' or tenant < found) then found = tenant end
  end
  return found
end

-- The cursor of an operation that begins with jobs created before a time.
function operations.first(tag, tenant, before)
  return cmsgpack.pack({tenant ~= '' and tenant or next_tenant(tag, ''), before, ''})
end

-- The cursor behind all jobs of a tenant.
function operations.behind(tag, tenant, of, before)
  return cmsgpack.pack({of ~= '' and '' or next_tenant(tag, tenant), before, ''})
end

function operations.finish(tag, id, state, now)
  local key = tag .. ':operation:' .. id
  redis.call('HSET', key, 'state', state, 'finished', now)
  redis.call('PEXPIRE', key, ENDED_MS)
  redis.call('ZREM', tag .. ':operations_open', id)
end
