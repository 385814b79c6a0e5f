-- outbox_replay: schedules a dead letter for delivery again, with a new series of attempts.
-- KEYS  1 tag
-- ARGV  1 job id  2 tenant
-- reply {'OK'}   {'NOT_FOUND'} no such record of the tenant
--       {state} it is not dead: due, taken, idle, delivered
local function outbox_replay(keys, argv)
  return {outbox.replay(keys[1], argv[1], argv[2], now_ms())}
end

register('outbox_replay', outbox_replay, 'allow-oom')
