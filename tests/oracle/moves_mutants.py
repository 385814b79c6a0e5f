"""Mistakes planted in the functions of homes and moves."""

from tests.oracle.mutants import Mutant

_MATCHES = "  return known[2] ~= string.format('%d in', version)\n"
_TEXTS = [
    (
        "a partition admits whom it does not know",
        _MATCHES,
        f"  return known[2] and{_MATCHES.removeprefix('  return')}",
    ),
    (
        "an old version of a home is admitted",
        _MATCHES,
        "  return not string.find(known[2] or '', ' in')\n",
    ),
    (
        "a departed tenant is still admitted",
        "tenant, string.format('%d out', version))",
        "tenant, string.format('%d in', version))",
    ),
    (
        "a late departure ends a later stay",
        "  if before > version or before == version and is_in then return {'STALE'} end\n",
        "",
    ),
    (
        "a late arrival begins an ended stay",
        "  if before > version or before == version and not is_in then return {'STALE'} end\n"
        "  if before == version then return {'OK'} end\n",
        "  if before == version and is_in then return {'OK'} end\n",
    ),
    (
        "an arrival that is repeated takes the old ledger again",
        "  if before == version then return {'OK'} end\n  redis.call('HSET', tag .. ':residents'",
        "  redis.call('HSET', tag .. ':residents'",
    ),
    (
        "what ended elsewhere counts twice",
        "    now[4] = argv[6]\n",
        "",
    ),
    (
        "a late report undoes a later one",
        "  if number > known_number then\n",
        "  if true then\n",
    ),
    (
        "a report of another stay is taken",
        "  if known[1] ~= tonumber(argv[3]) or not is_in then",
        "  if not is_in then",
    ),
    (
        "what is left elsewhere does not count",
        "reserved = found.reserved + found.away,",
        "reserved = found.reserved,",
    ),
    (
        "what a former home knew of others is lost",
        "    if left then table.insert(parts, {other, unpack(left)}) end\n",
        "",
    ),
    (
        "a home from which the tenant departed learns what its next home must",
        "  if known[1] ~= tonumber(argv[3]) or not is_in then",
        "  if known[1] ~= tonumber(argv[3]) then",
    ),
    (
        "what was left elsewhere in an earlier stay counts again",
        "    for _, other in ipairs(homes.others(tag, tenant)) do homes.set_away",
        "    for _, other in ipairs({}) do homes.set_away",
    ),
    (
        "a bound rises again",
        "local now = {known[1], math.min(known[2], tonumber(argv[4])),",
        "local now = {known[1], tonumber(argv[4]),",
    ),
    (
        "what ended in a former home is not told",
        "  homes.note_late(tag, job.tenant, more)\n",
        "",
    ),
    (
        "a tenant that returns loses what ended here meanwhile",
        "      homes.add_late(tag, tenant, own - known)\n",
        "",
    ),
    (
        "a home is chosen by an old map",
        "    if map[1] ~= argv[3] or not string.find",
        "    if not string.find",
    ),
    (
        "a partition that drains gets a tenant",
        "not string.find(map[2] or '', ' active') then return {'STALE'} end",
        "not map[2] then return {'STALE'} end",
    ),
    (
        "a move begins while another is under way",
        "  elseif state == 'in' and last ~= target then",
        "  elseif last ~= target then",
    ),
    (
        "a late end ends a later move",
        "    if state == 'moving' and version == argv[3] then state = 'in' end",
        "    state = 'in'",
    ),
    (
        "a partition is removed under its tenants",
        "    if string.match(known[i], '%d+$') == number then return true end\n",
        "",
    ),
    (
        "a map is changed by who knows an old one",
        "  if version ~= tonumber(argv[1]) then return {'STALE', version} end\n",
        "",
    ),
]
_SEEDS = {
    "an old version of a home is admitted": 3,
    "what was left elsewhere in an earlier stay counts again": 3,
    "a home is chosen by an old map": 2,
    "a partition that drains gets a tenant": 18,
}
MOVES_MUTANTS = [Mutant(*text, seed=_SEEDS.get(text[0], 0)) for text in _TEXTS]
