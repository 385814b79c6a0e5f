-- drain: orders workers to claim no more jobs, finish what they can, and exit. The order stays in the
-- worker's record because the message may be lost.
-- KEYS  1 tag
-- ARGV  incarnations
-- reply one verdict for each worker, in order:
--       'OK' ordered, now or before   'GONE' no such worker, or its record has expired
local function drain(keys, argv)
  local verdicts = {}
  for _, incarnation in ipairs(argv) do
    local worker = keys[1] .. ':worker:' .. incarnation
    if redis.call('EXISTS', worker) == 1 then
      redis.call('HSET', worker, 'order', 'drain')
      redis.call('PUBLISH', keys[1] .. ':ctl:' .. incarnation, 'drain')
      table.insert(verdicts, 'OK')
    else
      table.insert(verdicts, 'GONE')
    end
  end
  return verdicts
end

register('drain', drain, 'allow-oom')
