-- list: the jobs of a tenant, or of all, or a tenant's stored chats, youngest or oldest first; reads a
-- bounded number of records.
-- KEYS  1 tag
-- ARGV  1 tenant ('': all)  2 after this job ('': from the youngest), or `<created (ms)> <id>`: behind this
--       place, which may be another partition's  3 jobs at most
--       4 records read at most  5 filters (msgpack, _filters.lua)
-- reply {'NOT_FOUND'}      the job of argument 2 is not in the list
--       {'OK', job id, {{field, value, …}, …}}  job to continue after ('': none), records; a place where
--                                               argument 2 is one
-- Where the list begins; false: the job of the argument is gone.
local function start_of(key, after, before)
  local start = before > 0 and {created = before, id = ''} or nil
  if after == '' then return start end
  local time, id = string.match(after, '^(%d+) (%S+)$')
  if time then
    local place = {created = tonumber(time), id = id}
    return start and filters.is_before(place, start) and start or place
  end
  local created = redis.call('ZSCORE', key, after)
  if not created then return false end
  local cursor = {created = tonumber(created), id = after}
  return start and filters.is_before(cursor, start) and start or cursor
end

local function matches(key, filter)
  local record = redis.call('HMGET', key, 'state', 'lane', 'model', 'code', 'metadata', 'asked_model')
  if record[6] and record[6] == filter.model then record[3] = record[6] end
  return record[1] and filters.match(filter, record, record[5])  -- it may have expired
end

local function list(keys, argv)
  local tag, tenant, filter = keys[1], argv[1], filters.unpack(argv[5])
  local max_jobs, max_looks = tonumber(argv[3]), tonumber(argv[4])
  local key = tag .. (filter.is_chats and ':chats:' or ':jobs:') .. tenant
  local cursor = start_of(key, argv[2], filter.before)
  if cursor == false then return {'NOT_FOUND'} end
  local rows, is_more = filters.rows(key, cursor, max_looks, filter.is_ascending)
  local found = {}
  local function place(row)
    return string.find(argv[2], ' ', 1, true) and string.format('%.0f %s', row.created, row.id) or row.id
  end
  for i, row in ipairs(rows) do
    if row.created <= filter.since then return {'OK', '', found} end
    if try(matches, tag .. ':job:' .. row.id, filter) then  -- not a record that cannot be read
      if #found == max_jobs then return {'OK', i > 1 and place(rows[i - 1]) or argv[2], found} end
      table.insert(found, view(tag, row.id))
    end
  end
  return {'OK', is_more and place(rows[#rows]) or '', found}
end

register('list', list, 'no-writes')
