"""Mistakes planted in the functions, to check that the tests find them.

Over 300 lines: one table of texts and replacements.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mutant:
    """One text of the library and its replacement."""

    name: str
    text: str
    instead: str
    part: Literal["jobs", "outbox", "files", "operations"] = (
        "jobs"  # the walk that exercises it most
    )
    seed: int = 0  # of the walk that is tried first: it found this one, which few do

    def apply(self, source: str) -> str:
        assert source.count(self.text) == 1, f"{self.name}: the text is there once"
        return source.replace(self.text, self.instead)


MUTANTS = [
    Mutant(
        "every claim is a first wait in the totals",
        "  if is_first then\n    observe",
        "  if true then\n    observe",
        seed=4,
    ),
    Mutant(
        "a prompt counts with every output",
        "local is_first = job.tokens == 0 and num_tokens > 0",
        "local is_first = num_tokens > 0",
        seed=4,
    ),
    Mutant(
        "what fails took its time too",
        "  if status == 'succeeded' then\n    observe",
        "  if true then\n    observe",
    ),
    Mutant(
        "a tenant waits behind itself, as long as all weigh the same",
        "(redis.call('ZSCORE', active, tenant) and 1 or 0)",
        "0",
        seed=13,
    ),
    Mutant(
        "tenants that weigh the same do not wait for each other",
        "return redis.call('ZCARD', active) - ",
        "return 0 * ",
    ),
    Mutant(
        "the first claim is forgotten for the next",
        "'claimed', job.claimed or now,",
        "'claimed', now,",
        seed=9,
    ),
    Mutant(
        "a search passes over the second job",
        "for _, entry in ipairs(more) do table.insert(entries, entry) end",
        "for j = i == 2 and 2 or 1, #more do table.insert(entries, more[j]) end",
        seed=1,
    ),
    Mutant(
        "who runs still counts among those who wait",
        "add_to(counters_key(tag, job), {'queued_jobs', -1,",
        "add_to(counters_key(tag, job), {'queued_jobs', 0,",
    ),
    Mutant(
        "how far a job is that waited for its worker is not looked at",
        "if packed == nil then packed =",
        "if false then packed =",
    ),
    Mutant(
        "every claim is a first wait",
        "  if is_first then ledger.calibrate",
        "  if true then ledger.calibrate",
        seed=4,
    ),
    Mutant(
        "a job that was moved is held against its old lane's prediction",
        "'lane', job.lane, 'predicted', -1)\n    enqueue",
        "'lane', job.lane)\n    enqueue",
        seed=14,
    ),
    Mutant(
        "a detached job still needs a caller",
        "  redis.call('ZREM', tag .. ':attended', job.id)\n  redis.call('ZADD'",
        "  redis.call('ZADD'",
        seed=20,
    ),
    Mutant(
        "detaching shortens a deadline",
        "math.max(job.deadline, now + tonumber(argv[3]))",
        "now + tonumber(argv[3])",
    ),
    Mutant(
        "the epoch is no fence",
        "job.owner ~= incarnation or job.epoch ~= tonumber(epoch)",
        "job.owner ~= incarnation",
        seed=1,
    ),
    Mutant(
        "the owner is no fence",
        "job.owner ~= incarnation or job.epoch ~= tonumber(epoch)",
        "job.epoch ~= tonumber(epoch)",
    ),
    Mutant("a finished job can be written", "if TERMINAL[job.state] then return job.state end", ""),
    Mutant(
        "a repeated event is appended again",
        "if item.number < job.next then return 'OK', job.next end",
        "",
        seed=6,
    ),
    Mutant(
        "a gap is closed silently",
        "if item.number > job.next then return 'GAP', job.next end",
        "",
        seed=1,
    ),
    Mutant(
        "the output cap is off by one",
        "num_tokens > job.max_tokens",
        "num_tokens > job.max_tokens + 1",
        seed=1,
    ),
    Mutant(
        "an append does not renew the lease",
        "    table.insert(renewed, item.id)\n  else",
        "    local _\n  else",
        seed=9,
    ),
    Mutant(
        "an append of one that goes on does not renew the lease",
        "      renewed[#renewed + 1] = id\n",
        "",
        seed=29,
    ),
    Mutant(
        "one that goes on may leave a gap, and say all again",
        "known_epoch or tonumber(number) ~= next_number then",
        "known_epoch then",
        seed=7,
    ),
    Mutant(
        "one that goes on may do so past its deadline",
        "if now >= deadline or tokens > max_tokens or",
        "if tokens > max_tokens or",
        seed=9,
    ),
    Mutant(
        "an append renews leases that are to stay",
        "  if lease_ms > 0 then renew(",
        "  if true then renew(",
    ),
    Mutant(
        "a refusal is reported for the neighbouring job",
        "        table.insert(exceptions, i - FIRST_ID + 1)\n",
        "        table.insert(exceptions, math.max(1, i - FIRST_ID))\n",
    ),
    Mutant(
        "an end together with an event is not reported",
        "      if verdict ~= 'OK' or verdict_number ~= item.number + 1 then",
        "      if verdict ~= 'OK' then",
    ),
    Mutant(
        "the remaining tokens of a running job never shrink",
        "    remaining - num_tokens, model_lane)",
        "    remaining, model_lane)",
    ),
    Mutant(
        "a job that leaves its worker loses its progress",
        "'HSET', job.key, 'next', job.next, 'tokens', job.tokens, 'log_bytes',",
        "'HSET', job.key, 'log_bytes',",
        seed=5,
    ),
    Mutant(
        "a moved job keeps its old lane and deadline",
        "  running.write_back(tag, job)\n  if argv[4] ~= ''",
        "  if argv[4] ~= ''",
        seed=9,
    ),
    Mutant(
        "a caller reads progress from the record alone",
        "  local progress = running.progress(tag, redis.call('HGET', key, 'owner'), id) or {}",
        "  local progress = {}",
        seed=32,
    ),
    Mutant(
        "what goes on counts no tokens of its cost",
        "  gains.done = gains.done + num_tokens\n",
        "",
    ),
    Mutant(
        "a heartbeat does not renew leases",
        "      redis.call('ZADD', tag .. ':leases', now + lease_ms, argv[i])\n",
        "",
        seed=5,
    ),
    Mutant(
        "a claim grants no lease",
        "redis.call('ZADD', tag .. ':leases', now + lease_ms, job.id)\n  redis.call('SADD'",
        "redis.call('SADD'",
    ),
    Mutant(
        "a claim keeps the epoch", "job.epoch + 1, job.attempt + 1", "job.epoch, job.attempt + 1"
    ),
    Mutant(
        "an expired job is handed out",
        "    terminal(tag, job, 'expired', '', '', now)\n    return nil\n",
        "",
        seed=3,
    ),
    Mutant(
        "a job that ends keeps its lease",
        "  redis.call('ZREM', tag .. ':leases', job.id)\n  if job.owner",
        "  if job.owner",
    ),
    Mutant("a job that ends keeps its entry", "  redis.call('XDEL', key, job.entry)\n", ""),
    Mutant("a job that ends never goes", "  redis.call('PEXPIRE', job.key, job.ttl_ms)\n", ""),
    Mutant(
        "a job that is forgotten stays in its list",
        "for _, name in ipairs({tenant, ''}) do redis.call('ZREM'",
        "for _, name in ipairs({''}) do redis.call('ZREM'",
    ),
    Mutant(
        "what lies in the object store is forgotten with its job",
        "if has_objects then",
        "if false then",
    ),
    Mutant(
        "a running job can be deleted",
        "  if not TERMINAL[job.state] then return {job.state} end\n  forget(",
        "  forget(",
    ),
    Mutant(
        "retentions never end",
        "#entries\nend\n\nlocal function sweep",
        "0\nend\n\nlocal function sweep",
    ),
    Mutant(
        "a list skips the job after its page",
        "return {'OK', i > 1 and place(rows[i - 1])",
        "return {'OK', i > 1 and place(row)",
        seed=2,
    ),
    Mutant(
        "a job is not in the list of all tenants",
        "for _, name in ipairs({job.tenant, ''}) do redis.call('ZADD'",
        "for _, name in ipairs({job.tenant}) do redis.call('ZADD'",
    ),
    Mutant(
        "a tenant's pause does not hold it",
        "      if not pauses.hold(paused, lane, tenant) then\n",
        "      if true then\n",
        seed=17,
    ),
    Mutant(
        "what a paused tenant gave back is claimed",
        "pauses.hold(paused, lane or '', tenant or '')",
        "false",
        seed=27,
    ),
    Mutant(
        "a paused tenant saves credit",
        "ipairs(paused and lanes or {})",
        "ipairs({})",
        seed=367,
    ),
    Mutant(
        "others wait for what is paused",
        "if name ~= job.lane and paused then leave_out_paused",
        "if false then leave_out_paused",
        seed=9,
    ),
    Mutant("a paused lane accepts jobs", "pauses.hold(ahead.paused, ", "pauses.hold(nil, ", seed=2),
    Mutant(
        "a list ends where it stopped to look", "is_more and place(rows[#rows]) or ''", "''", seed=4
    ),
    Mutant(
        "a log that is kept elsewhere loses its end",
        "'MINID', (job.next - 1)",
        "'MINID', job.next",
        seed=6,
    ),
    Mutant(
        "a drain counts as an attempt",
        "job.releases + 1, 'attempt', job.attempt - 1",
        "job.releases + 1, 'attempt', job.attempt",
        seed=1,
    ),
    Mutant(
        "errors are tried for ever", "job.attempt >= job.max_attempts", "job.attempt > 1000", seed=4
    ),
    Mutant(
        "the second lapse is as the first",
        "requeue(tag, job, job.lapses > 0 and",
        "requeue(tag, job, job.lapses > 9 and",
        seed=5,
    ),
    Mutant(
        "the first crash makes a suspect",
        "requeue(tag, job, job.crashes == max_crashes - 1)",
        "requeue(tag, job, true)",
        seed=4,
    ),
    Mutant(
        "a job has company on its last run",
        "requeue(tag, job, job.crashes == max_crashes - 1)",
        "requeue(tag, job, false)",
        seed=4,
    ),
    Mutant(
        "poison is never poison",
        "if job.crashes < max_crashes then",
        "if job.crashes < 99 then",
        seed=9,
    ),
    Mutant(
        "a cancel forgets the job's worker",
        "job, 'cancelled', now_ms())",
        "job, 'expired', now_ms())",
    ),
    Mutant(
        "a key accepts another body",
        "body == terms.body_hash and 'EXISTS' or 'MISMATCH'",
        "'EXISTS'",
        seed=3,
    ),
    Mutant("memory is never full", "if not is_call and room <= 0 then", "if false then", seed=9),
    Mutant(
        "a lane takes what is another's own",
        "borrowed = borrowed + math.max(0, bytes - own)",
        "borrowed = borrowed + math.max(0, bytes - 2 * own)",
        seed=6,
    ),
    Mutant(
        "a tenant takes what is left",
        "+ job.bytes > TIMES_FREE * free then",
        "+ job.bytes > 1000 * free then",
        seed=6,
    ),
    Mutant(
        "the bytes of a job stay in its first lane",
        "  ledger.hold(tag, job)\n  return {'OK'}",
        "  return {'OK'}",
        seed=3,
    ),
    Mutant(
        "an ended job holds what was expected of it",
        "ledger.hold(tag, job, job.fixed + log_bytes + #message)",
        "ledger.hold(tag, job)",
        seed=6,
    ),
    Mutant(
        "results that have just come give way",
        "now - PASSING_MS, 'BYSCORE'",
        "now, 'BYSCORE'",
        seed=3,
    ),
    Mutant(
        "a call that became a job gives way",
        "  redis.call('HDEL', job.key, 'passing')\n",
        "",
        seed=406,
    ),
    Mutant(
        "an idle tenant saves up credit",
        "math.max(own, lane_clock(tag, model, lane)),",
        "own,",
        seed=1,
    ),
    Mutant(
        "an empty line forgets a debt",
        "if own > now then redis.call('ZADD', idle, own, tenant) end",
        "",
        seed=1,
    ),
    Mutant(
        "service is not charged",
        "'ZINCRBY', active, job.cost / fairness.weight(tag, job.tenant), job.tenant)",
        "'ZINCRBY', active, 0, job.tenant)",
        seed=1,
    ),
    Mutant(
        "service is charged alike to all weights",
        "job.cost / fairness.weight(tag, job.tenant)",
        "job.cost",
        seed=1,
    ),
    Mutant(
        "service is given back alike to all weights",
        "  tokens = tokens / fairness.weight(tag, tenant)\n",
        "",
        seed=9,
    ),
    Mutant(
        "a tenant keeps its first weight",
        "  fairness.set_weight(tag, job.tenant, job.weight)\n",
        "  if fairness.weight(tag, job.tenant) == 1 then\n"
        "    fairness.set_weight(tag, job.tenant, job.weight)\n  end\n",
        seed=1,
    ),
    Mutant("as much of each weight goes before", "sum + weights[name]", "sum + 1", seed=1),
    Mutant(
        "what was given back gets no place of another tenant",
        "  if found then\n    for _, id in ipairs(passed)",
        "  if false then\n    for _, id in ipairs(passed)",
        seed=19,
    ),
    Mutant(
        "unused service is not given back",
        "fairness.add_tokens(tag, job.model, job.lane, job.tenant, charge - job.charged)",
        "return",
        seed=3,
    ),
    Mutant(
        "a charge stays in the lane that a job leaves",
        "job.lane, job.tenant, -job.charged",
        "job.lane, job.tenant, 0",
        seed=61,
    ),
    Mutant(
        "a job is passed over for ever",
        ">= MAX_PASSED then",
        ">= 1000 then",
        seed=13,
    ),
    Mutant(
        "nobody counts who is passed over",
        "'passed', 1)",
        "'passed', 0)",
        seed=13,
    ),
    Mutant("no lane has a deficit", "if deficit > 0 then", "if false then", seed=1),
    Mutant("a lane takes places that are kept", "if lane.slots > num_filled then", "if true then"),
    Mutant(
        "nobody gets a place of another tenant",
        "if room <= 0 then return",
        "if true then return",
        seed=1,
    ),
    Mutant(
        "a tenant takes more than its share",
        "if slots + 1 > math.floor(fair.slots * weight / sum) then return 0 end",
        "",
        seed=9,
    ),
    Mutant(
        "a share of places is of those who hold any",
        " else sum = sum + weight end",
        " end",
        seed=9,
    ),
    Mutant(
        "a share has no bound in tokens",
        "math.floor(fair.tokens * weight / sum) - tokens",
        "ANY",
        seed=1,
    ),
    Mutant(
        "what a claim hands out is not held", "held.slots + choices, held.tokens + cost", "0, 0"
    ),
    Mutant(
        "a lane with a deficit takes any place",
        "if num_filled < lane.slots and lane.num_taken",
        "if lane.num_taken",
        seed=13,
    ),
    Mutant("a job fills one place", "num_filled + found.choices", "num_filled + 1", seed=1),
    Mutant("a job must fit as a whole", "cost / choices <= room", "cost <= room", seed=1),
    Mutant(
        "a length is that of a job",
        "local length = job.tokens / choices",
        "local length = job.tokens",
        seed=1,
    ),
    Mutant(
        "jobs for a deficit go before all others",
        "lane.num_taken < lane.max_deficit_slots and ",
        "",
        seed=43,
    ),
    Mutant("every lane has the room of the first", "words[3] or argv[5]", "argv[5]", seed=1),
    Mutant(
        "a share is not used up",
        "if lane.name == name then deficit = deficit - tokens end",
        "",
        seed=7,
    ),
    Mutant(
        "a job out of turn hides those before it", "if found.is_first then", "if true then", seed=1
    ),
    Mutant("a refund is kept", "(used - ledger.reserved(job)) * price", "0", seed=21),
    Mutant(
        "a refund has no price",
        "(used - ledger.reserved(job)) * price",
        "used - ledger.reserved(job)",
        seed=45,
    ),
    Mutant("every lane has the price of one", "lane == 'batch' and tonumber", "tonumber", seed=8),
    Mutant(
        "a call that enters is not counted",
        "if retry_ms == 0 then admission",
        "if false then admission",
        seed=27,
    ),
    Mutant("a call that entered counts twice", "if terms.is_counted then", "if false then", seed=5),
    Mutant("a meter knows no prices", "(job) * job.price", "(job)", seed=9),
    Mutant(
        "a limit knows no prices", "job.cost, job.cost * job.price", "job.cost, job.cost", seed=9
    ),
    Mutant(
        "a job keeps its price in another lane",
        "local more = ledger.price(lane, job.batch_price)",
        "local more = 0 * ledger.price(lane, job.batch_price)",
        seed=27,
    ),
    Mutant(
        "a reservation is never over", "'reserved', 0 - ledger.reserved(job))", "'reserved', 0)"
    ),
    Mutant("a cost never grows", "  ledger.grow(tag, job, now)\n", ""),
    Mutant(
        "a cost grows without end",
        "local more = math.min(excess + GROWTH, ",
        "local more = math.max(excess + GROWTH, ",
    ),
    Mutant("a grown cost is not reserved", "  ledger.reserve(tag, job, more)\n", ""),
    Mutant(
        "a grown cost is not in the meter",
        "tag, job, more * ledger.price",
        "tag, job, 0 * ledger.price",
        seed=9,
    ),
    Mutant("a grown cost is not running", "{'running_tokens', more}", "{'running_tokens', 0}"),
    Mutant("a cost is outgrown in the step", " or num_tokens > remaining", ""),
    Mutant(
        "an output that was cut lowers what is learned",
        "  if not is_whole and (gap <= 0 or seen == 0) then return end\n",
        "",
    ),
    Mutant(
        "an output that was cut raises nothing",
        "not is_whole and (gap <= 0 or seen == 0)",
        "not is_whole",
    ),
    Mutant("a caller teaches fast", "steered and 0.002 or 0.02", "0.02", seed=9),
    Mutant("a caller teaches first", "steered and job.max_tokens / choices or length", "length"),
    Mutant(
        "a caller's estimate is its limit",
        "math.ceil(estimate * choices), expected)",
        "expected > 0 and expected or math.ceil(estimate * choices))",
        seed=109,
    ),
    Mutant(
        "a caller's estimate raises nothing",
        "math.ceil(estimate * choices), expected)",
        "math.ceil(estimate * choices))",
    ),
    Mutant("what is forgotten stays stored", "name, '-' .. noted.stored)", "name, 0)"),
    Mutant(
        "what is forgotten stays in its lane's memory",
        "memory.add(tag, noted.lane, noted.tenant, -noted.bytes)\n  redis",
        "redis",
    ),
    Mutant(
        "a lane may take the memory of others",
        "if free < 0 then return",
        "if false then return",
        seed=3,
    ),
    Mutant(
        "no tenant stores too much",
        "terms.stored_bytes > terms.max_tenant_bytes then",
        "false then",
        seed=3,
    ),
    Mutant(
        "storage is never full", "terms.stored_bytes > terms.max_bytes then", "false then", seed=3
    ),
    Mutant("a meter does not leak", "math.max(0, now - at) * limit / 60000", "0", seed=4),
    Mutant(
        "no tenant is too greedy",
        "tenant.reserved + cost > concurrent then",
        "false then",
        seed=5,
    ),
    Mutant(
        "a refusal takes from the quota",
        "  if found.refusal then\n    local reason",
        "  if found.refusal then\n    ledger.reserve(tag, job)\n    local reason",
    ),
    Mutant(
        "urgent lanes are not ahead",
        "is_before = is_before and name ~= job.lane",
        "is_before = false",
    ),
    Mutant(
        "what others are guaranteed is counted on", "pool.rate * (1 - kept)", "pool.rate", seed=5
    ),
    Mutant(
        "a lane without work keeps its share from others",
        "elseif name ~= job.lane and load.queued_jobs > 0 then",
        "elseif name ~= job.lane then",
        seed=15,
    ),
    Mutant(
        "urgent lanes count as needing nothing more", "(1 - kept) - used,", "(1 - kept),", seed=3
    ),
    Mutant("use is never over", "if passed > 1 then return 0, 0 end", ""),
    Mutant("use has no yesterday", "return 0, tonumber(tokens) end", "return 0, 0 end", seed=3),
    Mutant(
        "a lane's own share is no help",
        "  if ahead.rates.own > 0 then\n",
        "  if false then\n",
        seed=3,
    ),
    Mutant(
        "a lane's bound drains as if it were alone",
        "= lane_refusal(pool, lane_rate, ahead, wait",
        "= lane_refusal(pool, pool.rate, ahead, wait",
        seed=129,
    ),
    Mutant(
        "jobs that began together end one by one",
        "pools.drain_ms(pool.rate, ahead.young_tokens))",
        "0)",
    ),
    Mutant(
        "jobs of a lane with a share that began together end one by one",
        "pools.drain_ms(pool.rate, ahead.own_young_tokens)))",
        "0))",
        seed=3,
    ),
    Mutant(
        "jobs of less urgent lanes keep their places",
        "if is_before or name == job.lane then\n      ahead.young",
        "if true then\n      ahead.young",
        seed=3,
    ),
    Mutant(
        "a cold start counts against a lane's bound",
        "local over = wait - (pool.live == 0 and terms.cold_ms or 0)",
        "local over = wait",
        seed=21,
    ),
    Mutant(
        "a lane without a measured rate has no bound",
        "return is_full and UNMEASURED_MS or nil",
        "return nil",
        seed=69,
    ),
    Mutant(
        "a cold start takes no time",
        "wait + (pool.live == 0 and cold_ms or 0)",
        "wait",
        seed=5,
    ),
    Mutant(
        "the dead count as live",
        "model, now - WORKER_TTL_MS, '+inf')\n  pool.rate",
        "model, '-inf', '+inf')\n  pool.rate",
        seed=4,
    ),
    Mutant("no deadline is beyond reach", "wait ~= UNKNOWN and late_ms > 0", "false"),
    Mutant(
        "progress is not counted",
        "  gains.done = gains.done + ledger.done(job) - done_before\n",
        "",
    ),
    Mutant(
        "outputs teach nothing", "gap * (gap > 0 and 0.2 or steered and 0.002 or 0.02)", "0", seed=1
    ),
    Mutant(
        "no grace after a restart",
        "until_ms = before and now + grace_ms or now",
        "until_ms = now",
        seed=8,
    ),
    Mutant(
        "a suspect has company",
        "redis.call('SCARD', tag .. ':alone:' .. model) >= quota",
        "false",
        seed=29,
    ),
    Mutant(
        "an order to drain needs no worker",
        "if redis.call('EXISTS', worker) == 1 then\n      redis.call('HSET', worker, 'order'",
        "if true then\n      redis.call('HSET', worker, 'order'",
    ),
    Mutant(
        "a draining worker counts as one that takes jobs",
        "if argv[4] == 'up' then",
        "if true then",
        seed=3,
    ),
    Mutant(
        "marks are noted at the time of the append",
        "kind, now - begun, now - ended, rest)",
        "kind, now, now - ended, rest)",
    ),
    Mutant("the hash forgets the past", "sha1hex(hash .. event)", "sha1hex(event)"),
    Mutant(
        "a log's bytes are those of its last event",
        "tokens, log_bytes + bytes, hash",
        "tokens, bytes, hash",
        seed=1,
    ),
    Mutant(
        "a log that goes on elsewhere has no bytes yet",
        "'tokens', job.tokens, 'log_bytes', job.log_bytes,",
        "'tokens', job.tokens, 'log_bytes', 0,",
        seed=1,
    ),
    Mutant(
        "all refused callers get the same retry time",
        "    if found.promised then promises.book(tag, job, found.promised, now) end\n",
        "",
        seed=3,
    ),
    Mutant(
        "a retry time ignores the lines before it",
        "at, lines = at + lines * gap_ms, lines + 1 end",
        "at, lines = at, 1 end",
        seed=3,
    ),
    Mutant(
        "a line gets the same retry time again",
        "if own > now then at = math.max(at, own)",
        "if own > now then at = at",
        seed=3,
    ),
    Mutant("a past promise counts", "key, '(' .. now, '+inf'", "key, 0, '+inf'", seed=3),
    Mutant(
        "promises outlive the overload",
        "  if found.ahead.jobs == 0 and found.wait == 0 then promises.forget(tag, job) end\n",
        "",
        seed=6,
    ),
    Mutant(
        "all of the drain rate is promised",
        "UNPROMISED_RATIO * job.cost",
        "job.cost",
        seed=3,
    ),
    Mutant(
        "limits per minute are booked as promises", "and not METERS[limit] then", "then", seed=33
    ),
    Mutant(
        "no wake message is published for a waiting job",
        "  redis.call('PUBLISH', tag .. ':wake:' .. job.model, job.lane)\n",
        "",
    ),
    Mutant(
        "what was given back does not count as waiting",
        "    table.insert(keys, lane_key(tag, 'back', model, lane.name))\n",
        "",
        seed=4,
    ),
    Mutant(
        "tenants' lines do not count as waiting",
        "    table.insert(keys, lane_key(tag, 'active', model, lane.name))\n",
        "",
    ),
    Mutant(
        "a worker that is up again is told as draining",
        "    redis.call('HDEL', pool, ASIDE .. incarnation)\n    return",
        "    return",
        seed=4,
    ),
    Mutant(
        "a worker drains since its last heartbeat",
        "redis.call('HSETNX', pool, ASIDE .. incarnation, now)",
        "redis.call('HSET', pool, ASIDE .. incarnation, now)",
        seed=9,
    ),
    Mutant(
        "a job that another worker takes loses an attempt",
        "        redis.call('HSET', job.key, 'attempt', job.attempt - 1)\n        requeue",
        "        requeue",
        seed=3,
    ),
    Mutant(
        "a worker takes what it offers itself",
        "elseif job.owner ~= argv[1] and (job.arm",
        "elseif (job.arm",
        seed=7,
    ),
    Mutant(
        "who has left its worker is taken by its old offer",
        "job.epoch, job.next) or job.owner == ''\n        or",
        "job.epoch, job.next) or",
        seed=27,
    ),
    Mutant(
        "a job is taken although it goes on since its offer",
        "if not job or offer ~= string.format('%s %d %d', job.id, job.epoch, job.next) or",
        "if not job or",
        seed=3,
    ),
    Mutant(
        "an offer holds for ever",
        "redis.call('ZRANGE', offers, now, '+inf',",
        "redis.call('ZRANGE', offers, 0, '+inf',",
        seed=15,
    ),
    Mutant(
        "an offered job passes a job that waits for room",
        "    if not lane then found, lane = take_offer",
        "    if not found then found, lane = take_offer",
        seed=19,
    ),
    Mutant(
        "a worker takes more than it has free",
        "math.min(argv[5], lane.room) then",
        "lane.room then",
        seed=19,
    ),
    Mutant(
        "a worker takes more than its lane has room for",
        "math.min(argv[5], lane.room) then",
        "tonumber(argv[5]) then",
        seed=7,
    ),
    Mutant(
        "a worker without a free slot takes a job",
        "local found = lane.slots > num_filled\n      and redis",
        "local found = redis",
        seed=7,
    ),
    Mutant(
        "an offer stays in the lane from which its job was moved",
        "\n        or job.lane ~= lane.name then",
        " then",
        seed=27,
    ),
]
