"""Mistakes planted in the functions of operations on many jobs."""

from tests.oracle.mutants import Mutant

_TEXTS = [
    (
        "a job that has ended is cancelled again",
        "  if not record[1] or (TERMINAL[record[1]] or false) == (op.kind == 'cancel') then",
        "  if not record[1] then",
    ),
    (
        "a cursor skips the job that found no room in a step",
        "== max_jobs then\n      return ids, cmsgpack.pack({created, id})",
        "== max_jobs then\n      return ids, cmsgpack.pack({row.created, row.id})",
    ),
    (
        "progress counts twice",
        "op.matched, op[count] = op.matched + 1, op[count] + 1",
        "op.matched, op[count] = op.matched + 1, op[count] + 2",
    ),
    (
        "an operation is lost with its gateway",
        "elseif state == 'running' and (whole_number(lease or 0) or 0) <= now then",
        "elseif state == 'running' and not lease then",
    ),
    (
        "a page is lost with the gateway that was to submit it",
        "if op.kind ~= 'replay' or #ids == 0 then op.cursor = cursor end",
        "op.cursor = cursor",
    ),
    (
        "two gateways hold an operation",
        "elseif state == 'running' and (whole_number(lease or 0) or 0) <= now then",
        "elseif state == 'running' then",
    ),
    (
        "a gateway gets another operation than it asked for",
        "argv[3] ~= '' and {argv[3]} or redis.call(",
        "redis.call(",
    ),
    (
        "the same operation is always worked on first",
        "      redis.call('ZADD', open, now, id)\n      return {id}",
        "      return {id}",
    ),
    ("a lapsed gateway works on", "op.token ~= argv[2] or op.lease <= now", "op.token ~= argv[2]"),
    ("another's token works", "op.token ~= argv[2] or op.lease <= now", "op.lease <= now"),
    (
        "a step does not renew the lease",
        "  redis.call('HSET', op.key, 'lease', now + tonumber(argv[3]))\n",
        "",
    ),
    (
        "a report is forgotten",
        "      op.done, op.failed = tonumber(argv[8]), tonumber(argv[9])\n",
        "",
    ),
    (
        "a stopped operation goes on",
        "  if op.state == 'running' then\n    if argv[6] ~= ''",
        "  if true then\n    if argv[6] ~= ''",
    ),
    (
        "an operation waits for room for ever",
        "if op.state == 'running' and now - op.created > OPEN_MS then",
        "if false then",
    ),
    (
        "jobs that are submitted later are meant",
        "  local before = now + 1  --",
        "  local before = now + 10000  --",
    ),
    (
        "jobs of the operation's own moment are left out",
        "  local before = now + 1  --",
        "  local before = now  --",
    ),
    (
        "an operation that has ended is taken again",
        "elseif state == 'running' and (whole",
        "elseif (whole",
    ),
    (
        "an operation of all tenants ends after its first step",
        "return ids, is_more and cmsgpack.pack({created, id}) or AT_END",
        "return ids, is_more and op.tenant ~= '' and cmsgpack.pack({created, id}) or AT_END",
    ),
    (
        "filters are not looked at",
        "  return filters.match(filter, record, record[5])",
        "  return true",
    ),
    (
        "jobs that are too old are meant",
        "    if is_jobs and row.created <= filter.since then",
        "    if false then",
    ),
    (
        "letters are read in the list of jobs",
        "tag .. (is_jobs and ':jobs:' or ':dead:') .. op.tenant",
        "tag .. ':jobs:' .. op.tenant",
    ),
    (
        "an operation that is added again begins anew",
        "  if redis.call('EXISTS', key) == 1 then return {'OK'} end\n  if is_full",
        "  if is_full",
    ),
    (
        "the open operations of others count",
        "if redis.call('HGET', tag .. ':operation:' .. id, 'owner') == owner then",
        "if true then",
    ),
    (
        "an operation that has ended stays open",
        "  redis.call('ZREM', tag .. ':operations_open', id)\nend",
        "end",
    ),
    (
        "an operation that has ended ends again",
        "  if state ~= 'running' then return {state} end\n  operations.finish",
        "  operations.finish",
    ),
]
_SEEDS = {"an operation waits for room for ever": 5, "an operation that has ended ends again": 1}
OPERATIONS_MUTANTS = [
    Mutant(*texts, part="operations", seed=_SEEDS.get(texts[0], 0)) for texts in _TEXTS
]
