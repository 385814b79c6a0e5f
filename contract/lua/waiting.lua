-- waiting: what waits for a model, for workers that choose between partitions; writes nothing.
-- KEYS  1 tag
-- ARGV  1 model  2 incarnation of the worker  3… lanes
-- reply {2 where the worker has the turn to run a suspect (claim), 1 where suspects wait, {weight, …}}
--       in the lanes' order: the sum of the weights of the tenants whose jobs wait, as text; 0: none; at
--       least 1 where jobs that were given back wait
local function waiting(keys, argv)
  local tag, model, weights = keys[1], argv[1], {}
  local paused = pauses.find(tag, model)
  for i = 3, #argv do
    local weight = 0
    if not pauses.hold(paused, argv[i], '') then
      weight = fairness.weight_of_others(tag, model, argv[i], '', paused)
      if redis.call('EXISTS', lane_key(tag, 'back', model, argv[i])) == 1 then
        weight = math.max(1, weight)
      end
    end
    table.insert(weights, string.format('%.17g', weight))
  end
  local holder, until_ms = string.match(redis.call('GET', tag .. ':turn:' .. model) or '', '^(%S+) (%d+)$')
  local has_turn = holder == argv[2] and tonumber(until_ms) > now_ms()
  return {has_turn and 2 or redis.call('EXISTS', tag .. ':q:' .. model .. ':suspect'), weights}
end

register('waiting', waiting, 'no-writes')
