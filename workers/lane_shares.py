"""The lanes that a worker claims from, most urgent first, and their guaranteed shares.

The engine has the same defaults (workers/engine/lanes.py); the supervisor does not import them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.ipc.messages import LaneOptions

_PRIORITY = {"interactive": 0, "standard": 1, "scoring": 1, "batch": 2}
_MIN_SHARE = {"batch": 0.05}
_OTHERS_PRIORITY = _PRIORITY["standard"]


@dataclass(frozen=True, slots=True)
class LaneTerms:
    """A lane's terms. The smallest priority is claimed first. The share, 0 to 1, is of claimed
    tokens."""

    priority: int
    min_share: float


UNKNOWN_LANE = LaneTerms(_OTHERS_PRIORITY, 0.0)  # as in the engine


def lane_terms(
    served: Sequence[str], given: Sequence[LaneOptions], *, adds_given: bool
) -> dict[str, LaneTerms]:
    """Terms by lane, in the order of claims; lanes of equal priority keep the order of `served`.

    `given`: the lanes of batching.yaml; `adds_given`: whether to claim from all of them. If any
    share is given, the default shares do not apply, as in the engine.
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
