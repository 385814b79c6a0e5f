"""How many jobs of each lane a worker has room for, where urgent ones take places from others.

Knows numbers of places and tokens; the engine does the displacing (workers/engine/gate.py).
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from workers.lane_shares import UNKNOWN_LANE, LaneTerms


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker could start now."""

    max_jobs: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """A job that the worker holds: places for its choices in the next step, and its cost."""

    lane: str
    num_places: int
    num_tokens: int


def rooms_by_lane(
    terms: Mapping[str, LaneTerms],
    held: Collection[Held],
    waiting_lanes: Iterable[str],
    whole: Room,
) -> dict[str, Room]:
    """The lanes with room, of the `whole` that the worker has.

    A lane finds all of it but what is held, and of the least urgent ones that are held, if it goes
    before them, all but their guaranteed shares: from those the engine takes first, shares or not,
    so that of the lanes between none is counted on. A lane has no room while the engine lets a
    sequence of its level, or of a more urgent one, wait: no worker hoards, and what was displaced
    is no obstacle.
    """
    waiting = [terms.get(name, UNKNOWN_LANE).priority for name in waiting_lanes]
    first_waiting = min(waiting, default=math.inf)
    sums: dict[str, Room] = {}
    for job in held:
        before = sums.get(job.lane, Room(0, 0))
        sums[job.lane] = Room(before.max_jobs + job.num_places, before.max_tokens + job.num_tokens)
    rooms = {name: _room(lane.priority, terms, sums, whole) for name, lane in terms.items()}
    return {
        name: room
        for name, room in rooms.items()
        if terms[name].priority < first_waiting and room.max_jobs > 0 and room.max_tokens > 0
    }


def _room(
    priority: int, terms: Mapping[str, LaneTerms], held: Mapping[str, Room], whole: Room
) -> Room:
    lanes = {name: terms.get(name, UNKNOWN_LANE) for name in held}
    last = max((lane.priority for lane in lanes.values()), default=priority)
    shares = [lane.min_share for lane in lanes.values() if lane.priority == last]
    # Of several lanes of the last level, the engine may take all from the one with a share.
    displaces = priority < last and (len(shares) == 1 or not any(shares))
    num_jobs, num_tokens = whole.max_jobs, whole.max_tokens
    for name, lane in lanes.items():
        kept = held[name]
        if displaces and lane.priority == last:
            kept = _guaranteed(kept, lane.min_share, whole)
        num_jobs -= kept.max_jobs
        num_tokens -= kept.max_tokens
    return Room(num_jobs, num_tokens)


def _guaranteed(has: Room, min_share: float, whole: Room) -> Room:
    """What of it no more urgent lane may take."""
    return Room(
        min(has.max_jobs, math.ceil(min_share * whole.max_jobs)),
        min(has.max_tokens, math.ceil(min_share * whole.max_tokens)),
    )
