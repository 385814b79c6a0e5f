-- Whether Redis has memory for more jobs.

local MEMORY_SHARE = 0.8    -- of maxmemory, up to which jobs are taken on
-- What was found out is good for so long, and that memory is free for so many jobs: to ask for it
-- takes a quarter of the time of a submit.
local FREE_MS = 1000
local FULL_MS = 100
local TRUSTED_JOBS = 16

local num_trusted = 0  -- jobs that may still come in unasked; the server's, of all tags together

-- Whether so much memory is in use that running jobs may need what is left. Where no maxmemory is
-- set, never.
local function is_memory_full(tag)
  local known = redis.call('GET', tag .. ':memory')
  num_trusted = num_trusted - 1
  if not known or (known == 'free' and num_trusted < 0) then
    local info = redis.call('INFO', 'memory')
    local function figure(name) return tonumber(string.match(info, name .. ':(%d+)') or 0) end
    local used = figure('\nused_memory') - figure('mem_not_counted_for_evict')
    local most = figure('\nmaxmemory')
    known = most > 0 and used > MEMORY_SHARE * most and 'full' or 'free'
    redis.call('SET', tag .. ':memory', known, 'PX', known == 'full' and FULL_MS or FREE_MS)
    num_trusted = TRUSTED_JOBS - 1
  end
  return known == 'full'
end
