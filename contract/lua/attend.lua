-- attend: a caller still waits for these jobs; jobs that nobody attends for too long are cancelled.
-- KEYS  1 tag
-- ARGV  job ids
-- reply the number of jobs that need attendance
local function attend(keys, argv)
  local tag, now, attended = keys[1], now_ms(), 0
  for _, id in ipairs(argv) do
    local attendance = tonumber(redis.call('HGET', tag .. ':job:' .. id, 'attendance') or 0)
    if attendance > 0 then
      attended = attended + 1
      redis.call('ZADD', tag .. ':attended', 'XX', now + attendance, id)
    end
  end
  return attended
end

register('attend', attend, 'allow-oom')
