"""Service classes: priorities, latency targets, minimum shares and ageing."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from workers.ipc.messages import LaneOptions


@dataclass(frozen=True, slots=True)
class Lane:
    """One service class. `workers.configuration` checks its numbers."""

    name: str
    priority: int  # the smallest is served first, and may preempt the others
    itl_target_s: float | None = None  # seconds between two tokens of a stream
    min_share: float = 0.0  # of the computed tokens, while the lane has work
    # An unserved tenant rises by one priority for this many tokens of others.
    ageing_tokens: int = 32_768
    # Its work lengthens the steps of lanes without this limit by at most so many times. None: it is
    # one of those.
    max_slowdown: float | None = None


STANDARD = Lane("standard", priority=1)
DEFAULT_LANES = (
    Lane("interactive", priority=0, itl_target_s=0.1),
    STANDARD,
    Lane("batch", priority=2, min_share=0.05, max_slowdown=1.3),
)
# Of prompts that are computed before anybody asks for them; no call can name it.
WARM = Lane("-warm", priority=2**20, max_slowdown=1.0)


def lanes_of(options: Sequence[LaneOptions]) -> list[Lane]:
    """The default lanes, changed and extended by the options, and the lane of warming.

    If any minimum share is given, the defaults are dropped: together they might exceed 1.
    """
    lanes = {lane.name: lane for lane in DEFAULT_LANES}
    if any(given.min_share is not None for given in options):
        lanes = {name: dataclasses.replace(lane, min_share=0.0) for name, lane in lanes.items()}
    for given in options:
        lane = lanes.get(given.name) or dataclasses.replace(STANDARD, name=given.name)
        names = ("priority", "itl_target_s", "min_share", "ageing_tokens", "max_slowdown")
        values = {name: getattr(given, name) for name in names}
        changes = {name: value for name, value in values.items() if value is not None}
        lanes[given.name] = dataclasses.replace(lane, **changes)
    return [*lanes.values(), WARM]


def lanes_to_claim(
    served: Sequence[str], options: Sequence[LaneOptions], *, adds_given: bool
) -> dict[str, Lane]:
    """The lanes to claim from, in order; those of equal priority keep the order of `served`. Others
    are treated as `standard`. `adds_given`: whether to claim from all that the options name."""
    lanes = {lane.name: lane for lane in lanes_of(options)}
    added = [lane.name for lane in options if adds_given and lane.name not in served]
    found = {name: lanes.get(name, STANDARD) for name in (*served, *added)}
    return dict(sorted(found.items(), key=lambda item: item[1].priority))
