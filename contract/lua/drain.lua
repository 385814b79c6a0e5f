-- drain: tells workers to take no more jobs, end what they can, and go. The order stays in the
-- worker's record, for the message may be lost.
-- KEYS  1 tag
-- ARGV  incarnations
-- reply one verdict for each worker, in order:
--       'OK' it is told, now or before   'GONE' no such worker, or unheard of for long
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
