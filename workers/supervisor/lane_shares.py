"""Which lanes a worker takes jobs from, most urgent first, and the share that each is promised.

The engine has the same lanes for its steps (workers/engine/lanes.py); this is what its supervisor,
which does not import it, claims by.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.ipc.batching import LaneOptions

_PRIORITY = {"interactive": 0, "standard": 1, "scoring": 1, "batch": 2}
_MIN_SHARE = {"batch": 0.05}
_OTHERS_PRIORITY = _PRIORITY["standard"]


@dataclass(frozen=True, slots=True)
class LaneTerms:
    """What claims go by: the smallest priority first, and the share of the claimed tokens."""

    priority: int
    min_share: float


UNKNOWN_LANE = LaneTerms(_OTHERS_PRIORITY, 0.0)  # as the engine treats it


def lane_terms(
    served: Sequence[str], given: Sequence[LaneOptions], *, adds_given: bool
) -> dict[str, LaneTerms]:
    """Terms by lane, in the order of claims.

    `served` keep their order where they have the same priority; `adds_given`: the lanes that an
    operator has made are served too. Shares that are given are all there are, as for the engine.
    """
    options = {lane.name: lane for lane in given}
    names = [*served, *(name for name in options if adds_given and name not in served)]
    has_shares = any(lane.min_share is not None for lane in given)

    def priority(name: str) -> int:
        lane = options.get(name)
        if lane is not None and lane.priority is not None:
            return lane.priority
        return _PRIORITY.get(name, _OTHERS_PRIORITY)

    def min_share(name: str) -> float:
        lane = options.get(name)
        if lane is not None and lane.min_share is not None:
            return lane.min_share
        return 0.0 if has_shares else _MIN_SHARE.get(name, 0.0)

    return {
        name: LaneTerms(priority(name), min_share(name)) for name in sorted(names, key=priority)
    }
