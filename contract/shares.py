"""How partitions share the fleet's bounds: by weight, and what some do not use goes to those that
are full. One step of the rule; gateway/redis/shards.py takes it.

Parts and uses are fractions of the fleet's bound. What is taken is given a period later, when every
gateway knows that it was taken, and only as far as the queues have sunk: what waits in all
partitions never exceeds the bound, whichever of two successive maps a gateway knows.
"""

from collections.abc import Collection, Mapping

from contract.partitions import PartitionMap

PERIOD_S = 5.0
STEP = 0.1  # of the fleet's bound: the most that is taken, and that is given, in a period
_FLOOR = 0.25  # of its part by weight, which a partition keeps
_FULL = 0.75  # of its part, from which on a partition gets more
_ROOM = 2.0  # times what it uses, which a partition keeps
_LEAST = 0.005  # less is not worth a new map
_DIGITS = 10_000


def rebalanced(
    known: PartitionMap, used: Mapping[int, float], refusing: Collection[int] = ()
) -> dict[int, float] | None:
    """The parts after a period; None: they stay. `refusing`: partitions that have refused for their
    bound. Where none is full, parts return to those by weight."""
    weights = {number: known.weight_share(number) for number in known.numbers}
    parts = {number: known.share(number) for number in known.numbers}
    full = [n for n in parts if n in refusing or used[n] > _FULL * parts[n]]
    wanted = {n: weights[n] for n in full} or {
        n: weights[n] - parts[n] for n in parts if parts[n] < weights[n]
    }
    if not wanted:
        return None
    free = max(0.0, 1.0 - sum(max(parts[n], used[n]) for n in parts))
    given = min(STEP, free) if full else min(STEP, free, sum(wanted.values()))
    kept = _FLOOR if full else 1.0
    spare = {
        n: max(0.0, parts[n] - max(kept * weights[n], _ROOM * used[n]))
        for n in parts.keys() - wanted.keys()
    }
    taken = min(max(0.0, STEP - (free - given)), sum(spare.values()))
    new = dict(parts)
    for number, part in wanted.items():
        new[number] += given * part / sum(wanted.values())
    for number, part in spare.items():
        new[number] -= taken * part / sum(spare.values()) if taken else 0.0
    if max(abs(new[n] - parts[n]) for n in parts) < _LEAST:
        return None
    return {number: int(part * _DIGITS) / _DIGITS for number, part in new.items()}
