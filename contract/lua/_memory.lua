-- Whether Redis has memory for more jobs.

local MEMORY_SHARE = 0.8    -- of maxmemory, up to which jobs are taken on
local MEMORY_KNOWN_MS = 100  -- what was found out is good for so long: INFO costs as much as submit

-- Whether so much memory is in use that running jobs may need what is left. Where no maxmemory is
-- set, never.
local function is_memory_full(tag)
  local known = redis.call('GET', tag .. ':memory')
  if not known then
    local info = redis.call('INFO', 'memory')
    local function figure(name) return tonumber(string.match(info, name .. ':(%d+)') or 0) end
    local used = figure('\nused_memory') - figure('mem_not_counted_for_evict')
    local most = figure('\nmaxmemory')
    known = most > 0 and used > MEMORY_SHARE * most and 'full' or 'free'
    redis.call('SET', tag .. ':memory', known, 'PX', MEMORY_KNOWN_MS)
  end
  return known == 'full'
end
