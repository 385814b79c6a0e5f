-- list: a tenant's jobs, youngest first; reads a bounded number of records.
-- KEYS  1 tag
-- ARGV  1 tenant  2 after this job ('': from the youngest)  3 created after this time (ms, 0: any)
--       4 jobs at most  5 records read at most  6 states, each followed by a space ('': any)
--       7 lane ('': any)  8 model ('': any)  9… metadata: key, value, …
-- reply {'NOT_FOUND'}      the job of argument 2 is not in the list
--       {'OK', job id, {{field, value, …}, …}}  job to continue after ('': none), records

-- Whether a job matches the filters.
local function matches(key, argv)
  local state, lane, model, raw = unpack(
    redis.call('HMGET', key, 'state', 'lane', 'model', 'metadata'))
  if not state then return false end  -- expired since the last sweep
  if argv[6] ~= '' and not string.find(argv[6], state .. ' ', 1, true) then return false end
  if argv[7] ~= '' and argv[7] ~= lane then return false end
  if argv[8] ~= '' and argv[8] ~= model then return false end
  if #argv < 9 then return true end
  if not raw or raw == '' then return false end
  local metadata = cmsgpack.unpack(raw)
  for i = 9, #argv, 2 do
    if metadata[argv[i]] ~= argv[i + 1] then return false end
  end
  return true
end

local function list(keys, argv)
  local tag, jobs = keys[1], keys[1] .. ':jobs:' .. argv[1]
  local since, max_jobs, max_looks = tonumber(argv[3]), tonumber(argv[4]), tonumber(argv[5])
  local first = 0
  if argv[2] ~= '' then
    local rank = redis.call('ZREVRANK', jobs, argv[2])
    if not rank then return {'NOT_FOUND'} end
    first = rank + 1
  end
  local found = {}
  local rows = redis.call('ZREVRANGE', jobs, first, first + max_looks - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local id, created = rows[i], tonumber(rows[i + 1])
    if created <= since then return {'OK', '', found} end
    local key = tag .. ':job:' .. id
    if try(matches, key, argv) then  -- not a record that cannot be read
      if #found == max_jobs then return {'OK', rows[i - 2], found} end
      table.insert(found, view(tag, rows[i]))
    end
  end
  return {'OK', #rows == 2 * max_looks and rows[#rows - 1] or '', found}
end

register('list', list, 'no-writes')
