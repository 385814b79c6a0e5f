-- outbox_dead: a tenant's dead letters, youngest first, or one of them; writes nothing.
-- KEYS  1 tag
-- ARGV  1 tenant  2 job id ('': all)  3 records at most  4 that died before this time (ms, '': any)
-- reply list of {job id, died (ms), {field, value, …}}
local function outbox_dead(keys, argv)
  local tag, tenant = keys[1], argv[1]
  local dead = outbox.dead(tag, tenant)
  local rows
  if argv[2] ~= '' then
    local died = redis.call('ZSCORE', dead, argv[2])
    rows = died and {argv[2], died} or {}
  else
    local before = argv[4] ~= '' and '(' .. argv[4] or '+inf'
    rows = redis.call('ZRANGE', dead, before, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, argv[3],
      'WITHSCORES')
  end
  local letters = {}
  for i = 1, #rows, 2 do
    local fields = redis.call('HGETALL', tag .. ':out:' .. rows[i])
    if #fields > 0 then table.insert(letters, {rows[i], tonumber(rows[i + 1]), fields}) end
  end
  return letters
end

register('outbox_dead', outbox_dead, 'no-writes')
