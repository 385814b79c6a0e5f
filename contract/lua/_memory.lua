-- Tells whether Redis has memory for more jobs.

local MEMORY_SHARE = 0.8    -- of maxmemory, up to which jobs are accepted
-- How long a result is cached, and for how many jobs the result `free` holds. INFO takes a quarter of
-- the time of a submit.
local FREE_MS = 1000
local FULL_MS = 100
local TRUSTED_JOBS = 16

local num_trusted = 0  -- jobs to accept before the next INFO, over all tags of the server

-- Whether the memory in use leaves only a reserve for running jobs. False without a maxmemory.
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
