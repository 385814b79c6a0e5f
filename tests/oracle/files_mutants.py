"""Mistakes planted in the functions of files and batches."""

from tests.oracle.mutants import Mutant

_FENCED = "token ~= argv[2] or (whole_number(lease) or 0) <= now"
_TEXTS = [
    (
        "a foreign tenant drops a file",
        "if not tenant or (argv[2] ~= '' and tenant ~= argv[2]) then",
        "if not tenant then",
    ),
    (
        "the bytes of a dropped file still count",
        "tenant, -(whole_number(record[2]) or 0)) <= 0",
        "tenant, 0) <= 0",
    ),
    (
        "a dropped file stays listed",
        "  redis.call('ZREM', tag .. ':files:' .. tenant, id)\n",
        "",
    ),
    (
        "the content of a dropped file is kept",
        "  redis.call('ZADD', tag .. ':objects_due', now_ms(), id)\n",
        "",
    ),
    ("a tenant's files have no bound", "if most > 0 and held + bytes > most then", "if false then"),
    ("a file that is added again counts twice", "  if known[1] then  --", "  if false then  --"),
    (
        "a file that is written again counts as before",
        "bytes - (whole_number(known[3]) or 0))",
        "0)",
    ),
    (
        "a file never expires",
        "  redis.call('ZADD', tag .. ':objects_due', expires, id)\n",
        "",
    ),
    (
        "a content without a record is kept",
        "redis.call('ZADD', keys[1] .. ':objects_due', 'NX',",
        "redis.call('ZADD', keys[1] .. ':other', 'NX',",
    ),
    (
        "a content is due for deletion in its first moment",
        "now_ms() + tonumber(argv[2]), argv[1])",
        "now_ms(), argv[1])",
    ),
    ("a repeated beginning brings a file's end nearer", "':objects_due', 'NX',", "':objects_due',"),
    ("an expired file is read", "return expires > now and", "return expires > 0 and"),
    ("every file is due", "due, '-inf', now_ms(),", "due, '-inf', '+inf',"),
    (
        "a batch that is added again begins anew",
        "  if redis.call('EXISTS', key) == 1 then return {'OK'} end\n  local window",
        "  local window",
    ),
    (
        "a tenant's list of batches never goes",
        "  redis.call('PEXPIRE', list, window + 2 * keep)\n",
        "",
    ),
    (
        "a foreign tenant cancels a batch",
        "if not status or record[2] ~= argv[2] then",
        "if not status then",
    ),
    (
        "a batch can be cancelled while its results are joined",
        "if status == 'validating' or status == 'in_progress' then",
        "if status == 'validating' or status == 'in_progress' or status == 'finalizing' then",
    ),
    (
        "two feeders lease a batch",
        "elseif (whole_number(lease) or 0) > now then",
        "elseif false then",
    ),
    (
        "a repeated take leaves batches without a feeder",
        "if token == argv[1] then\n        take(id)",
        "if false then\n        take(id)",
    ),
    (
        "batches in progress are validated",
        "elseif (status == 'in_progress') == (argv[3] == '1') then",
        "else",
    ),
    (
        "a tenant's older batches go before another's first",
        "    if a.turn ~= b.turn then return a.turn < b.turn end\n",
        "",
    ),
    (
        "batches that are held elsewhere do not count",
        "held[tenant] = (held[tenant] or 0) + 1",
        "local _",
    ),
    (
        "a place for tenants without any goes to one with several",
        "(batch.turn == 0 and more or 0)",
        "more",
    ),
    (
        "a tenant's open batches have no bound",
        "if most > 0 and num_open(tag, tenant) >= most then",
        "if false then",
    ),
    ("the open batches of others count", "'tenant') == tenant then", "'tenant') then"),
    ("a lapsed feeder still writes", _FENCED, "token ~= argv[2]"),
    ("another feeder writes", _FENCED, "(whole_number(lease) or 0) <= now"),
    (
        "progress does not renew a feeder's lease",
        "  redis.call('HSET', key, 'lease', now + tonumber(argv[3]))\n",
        "",
    ),
    (
        "a feeder does not see a cancel",
        "if argv[4] ~= '' and status ~= argv[4] and not is_repeat then",
        "if false then",
    ),
    ("a repeated save is refused", "status ~= argv[4] and not is_repeat", "status ~= argv[4]"),
    (
        "a repeated save moves a time",
        "if argv[5] ~= '' and not is_repeat then",
        "if argv[5] ~= '' then",
    ),
    ("a batch ends twice", "  if DONE[status] then\n    return", "  if false then\n    return"),
    (
        "a part is not recorded",
        "redis.call('HSET', tag .. ':batch_parts:' .. id, argv[6], argv[7])",
        "local _",
    ),
    (
        "a lost part stays recorded",
        "redis.call('HDEL', tag .. ':batch_parts:' .. id, argv[6])",
        "local _",
    ),
    (
        "a batch that has ended stays open",
        "    redis.call('ZREM', tag .. ':batches_open', id)\n    redis.call('ZADD'",
        "    redis.call('ZADD'",
    ),
    ("nobody is told of a batch's end", "    tell(tag, id, key, DONE[status], now)\n", ""),
    ("a batch that has ended never goes", "    redis.call('PEXPIRE', key, keep)\n", ""),
    (
        "the parts of a batch never go",
        "    redis.call('PEXPIRE', tag .. ':batch_parts:' .. id, keep)\n",
        "",
    ),
    (
        "the objects of parts are kept",
        "    redis.call('ZADD', tag .. ':objects_due', now + PART_DELAY_MS, id)\n",
        "",
    ),
]
_SEEDS = {
    "a repeated beginning brings a file's end nearer": 1,
    "a batch can be cancelled while its results are joined": 9,
    "a repeated take leaves batches without a feeder": 4,
    "batches that are held elsewhere do not count": 1,
    "a place for tenants without any goes to one with several": 1,
    "a repeated save is refused": 36,
    "a repeated save moves a time": 4,
    "a lost part stays recorded": 1,
}
FILES_MUTANTS = [Mutant(*texts, part="files", seed=_SEEDS.get(texts[0], 0)) for texts in _TEXTS]
