-- Pauses: no new jobs of a lane, of a tenant, or of a tenant in a lane are accepted, and no waiting ones
-- are claimed, until they are resumed. The hash `paused` has a field `<model> <lane> <tenant>` for each
-- pause, where `*` stands for all: `<ms of its beginning> operator` or, where the tenant paused its own
-- jobs, `… tenant`. Jobs that run go on, and so do deadlines.
-- requires shared

local PAUSED_RETRY_MS = 30000  -- nobody knows how long a pause lasts

-- The pauses of a model: {lanes, tenants: sets; lines: by lane a set of tenants; behind: by stream the last of
-- the paused jobs in front, as far as the call has seen them}. nil where it has none.
function pauses.find(tag, model)
  local found
  local known = redis.call('HGETALL', tag .. ':paused')
  for i = 1, #known, 2 do
    local of, lane, tenant = string.match(known[i], '^(%S+) (%S+) (.+)$')
    if of == '*' or of == model then
      found = found or {lanes = {}, tenants = {}, lines = {}, behind = {}}
      if tenant == '*' then
        found.lanes[lane] = true
      else
        local set = lane == '*' and found.tenants or found.lines[lane] or {}
        if lane ~= '*' then found.lines[lane] = set end
        set[tenant] = true
      end
    end
  end
  return found
end

-- Whether a tenant's jobs in a lane are paused. `found`: see pauses.find.
function pauses.hold(found, lane, tenant)
  return found and (found.lanes[lane] or found.lanes['*'] or found.tenants[tenant]
    or found.lines[lane] and found.lines[lane][tenant]) or false
end

-- The tenants that are paused in a lane which is not, {tenant = true, …}.
function pauses.tenants_in(found, lane)
  local tenants = {}
  for tenant in pairs(found.tenants) do tenants[tenant] = true end
  for tenant in pairs(found.lines[lane] or {}) do tenants[tenant] = true end
  return tenants
end
