-- quote: what submit would reply, and how long the job would run; writes nothing.
-- KEYS  1 tag
-- ARGV  as submit; idempotency key and body hash are ignored
-- reply {'OK' or the refusal's reason, limit, ms until a retry may succeed (-1: unknown),
--        {jobs ahead, tokens ahead, ms until it starts (-1: unknown)},
--        ms that it runs (0: unknown), cost (prompt + predicted output, tokens), rates,
--        tokens of the prompt that a worker seems to hold}
local function quote(keys, argv)
  local tag, now, terms = keys[1], now_ms(), cmsgpack.unpack(argv[6])
  local job = {tenant = argv[2], model = argv[3], lane = argv[4], part = terms.part}
  job.num_sent = #argv[5] + #argv[7] + 2 * #argv[8] + #(argv[9] or '')
  local found = admission.evaluate(tag, job, terms, now, memory.room(tag, false))
  local _, num_held = residence.find(tag, job.model, argv[9] or '', now)
  local reason, limit, retry_ms = unpack(found.refusal or {'OK', '', UNKNOWN})
  return {reason, limit, retry_ms, {found.ahead.jobs, found.ahead.tokens, found.wait},
    found.service, job.cost, admission.rates(found.tenant, terms), num_held or 0}
end

register('quote', quote, 'no-writes')
