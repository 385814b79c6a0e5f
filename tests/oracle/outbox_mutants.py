"""Mistakes planted in the functions of the outbox and in the functions that write to it."""

from tests.oracle.mutants import Mutant

_TEXTS = [
    (
        "an end is not posted",
        "  outbox.post(tag, job, status, now, code, message)\n",
        "",
    ),
    (
        "progress overtakes a message that is being delivered",
        "  if is_taken then return end\n",
        "",
    ),
    (
        "the start is posted again",
        "if is_first and job.callback_started",
        "if job.callback_started",
    ),
    (
        "progress is posted twice",
        "job.tokens % every < num_tokens",
        "job.tokens % every <= num_tokens",
    ),
    (
        "progress is posted with the end",
        "fin == '' and job.callback_every or 0",
        "job.callback_every or 0",
    ),
    (
        "a destination has no bound",
        "redis.call('ZCARD', tag .. ':flying:' .. to) < cap",
        "true",
    ),
    (
        "a taken message stays due",
        "  redis.call('ZREM', tag .. ':due:' .. to, id)\n  local record",
        "  local record",
    ),
    (
        "a lost attempt is never made again",
        "      redis.call('ZADD', tag .. ':due:' .. to, now, id)\n    end\n  end",
        "    end\n  end",
    ),
    (
        "an old attempt may end a new one",
        "  if record.attempt ~= argv[2] then return {'FENCED'} end\n",
        "",
    ),
    (
        "a repeated result of an attempt counts twice",
        "  if record.taken == '' then return {'OK'} end\n",
        "",
    ),
    (
        "a finished attempt may begin",
        "record[1] ~= 'taken' or record[2] ~= argv[2]",
        "record[2] ~= argv[2]",
    ),
    (
        "a newer message is lost",
        "if record.taken == record.number then\n    state",
        "if true then\n    state",
    ),
    (
        "an attempt delivers an old message",
        "  if argv[4] == 'begin' then redis.call('HSET', key, 'taken', record[3]) end\n",
        "",
    ),
    (
        "a renewed lease counts a newer message as delivered",
        "  if argv[4] == 'begin' then redis",
        "  if true then redis",
    ),
    (
        "a lease is not renewed",
        ("  outbox.lease(tag, record[5], record[4], id, tonumber(argv[3]), now_ms())\n"),
        "",
    ),
    (
        "failures are not counted",
        "    redis.call('HINCRBY', key, 'failures', 1)\n",
        "",
    ),
    (
        "a dead progress is kept",
        "  if not TERMINAL[record.kind] then return 'idle' end\n",
        "",
    ),
    (
        "a secret outlives its use",
        "    redis.call('HDEL', key, 'callback')  -- it may hold a secret\n",
        "",
    ),
    (
        "the dead are kept for ever",
        "  if TERMINAL[kind] then redis.call('PEXPIRE', key, OUTBOX_KEEP_MS) end\n",
        "",
    ),
    (
        "a foreign tenant replays",
        "if record[2] ~= tenant then return 'NOT_FOUND' end",
        "if not record[2] then return 'NOT_FOUND' end",
    ),
    (
        "a replayed letter stays dead",
        "  redis.call('ZREM', outbox.dead(tag, tenant), id)\n",
        "",
    ),
    (
        "a replay wakes nobody",
        "  outbox.wake(tag, tenant, record[3], now)\n",
        "",
    ),
    (
        "a destination is forgotten",
        "  outbox.reschedule(tag, record.tenant, record.to, now, math.huge)\n",
        "",
    ),
    (
        "a tenant takes every place",
        "num_flying + 1 <= TIMES_FREE * (free - 1)",
        "true",
    ),
    (
        "a tenant's places are never free again",
        "  redis.call('ZREM', outbox.flying_of(tag, record.tenant), id)\n",
        "",
    ),
    (
        "a tenant with more to send is forgotten",
        "first and math.max(first, now) or math.huge, tenant",
        "math.huge, tenant",
    ),
    (
        "a full destination is looked at for ever",
        "if redis.call('ZCARD', in_flight) >= cap then due = nil end",
        "due = nil",
    ),
]
_SEEDS = {
    "the start is posted again": 1,
    "an attempt delivers an old message": 4,
    "a renewed lease counts a newer message as delivered": 14,
    "a lease is not renewed": 4,
    "a replay wakes nobody": 5,
}
OUTBOX_MUTANTS = [Mutant(*texts, part="outbox", seed=_SEEDS.get(texts[0], 0)) for texts in _TEXTS]
