"""How many jobs of each lane a worker has room for, if urgent lanes may displace others.

Counts places and tokens only; workers/engine/admission_check.py displaces sequences.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from contract.function_types import FairRoom, LaneRoom
from workers.lanes import STANDARD, Lane


@dataclass(frozen=True, slots=True)
class HeldPlaces:
    """A job that the worker holds: the places its choices need in the next step, and its cost."""

    lane: str
    tenant: str
    num_places: int
    num_tokens: int


def rooms_by_lane(
    terms: Mapping[str, Lane],
    held: Collection[HeldPlaces],
    waiting_lanes: Iterable[str],
    whole: LaneRoom,
) -> dict[str, LaneRoom]:
    """The room of each lane that has any. `whole`: the capacity of the worker.

    A lane may use whatever is not held. If it is more urgent than the least urgent lane that holds
    jobs, it may also use what that lane holds beyond its guaranteed share. The engine displaces
    from the least urgent lane first, so lanes in between count as held. A lane has no room while
    a sequence of the same or a more urgent level waits in the engine, so no worker hoards jobs.
    Displaced sequences of less urgent levels do not count.

    A lane without room has `LaneRoom.fair`: a tenant below its share may take places from another
    tenant. A worker therefore holds at most twice as many jobs as it has places.
    """
    held = list(held)
    waiting = [terms.get(name, STANDARD).priority for name in waiting_lanes]
    first_waiting = min(waiting, default=math.inf)
    sums: dict[str, LaneRoom] = {}
    for job in held:
        before = sums.get(job.lane, LaneRoom(0, 0))
        sums[job.lane] = LaneRoom(
            before.max_jobs + job.num_places, before.max_tokens + job.num_tokens
        )
    rooms: dict[str, LaneRoom] = {}
    for name, lane in terms.items():
        room = _room(name, terms, sums, whole)
        if lane.priority < first_waiting and room.max_jobs > 0 and room.max_tokens > 0:
            rooms[name] = room
        elif name in sums and lane.priority <= first_waiting:
            rooms[name] = LaneRoom(0, 0, fair=_fair_room(name, held, room))
    return rooms


def _fair_room(asking: str, held: Iterable[HeldPlaces], room: LaneRoom) -> FairRoom:
    """The lane's total (`room` plus what its jobs hold), and what each tenant holds of it."""
    num_jobs, num_tokens = room.max_jobs, room.max_tokens
    parts: dict[str, tuple[int, int]] = {}
    for job in held:
        if job.lane == asking:
            before = parts.get(job.tenant, (0, 0))
            parts[job.tenant] = before[0] + job.num_places, before[1] + job.num_tokens
            num_jobs += job.num_places
            num_tokens += job.num_tokens
    return FairRoom(max(0, num_jobs), max(0, num_tokens), parts)


def _room(
    asking: str, terms: Mapping[str, Lane], held: Mapping[str, LaneRoom], whole: LaneRoom
) -> LaneRoom:
    priority = terms[asking].priority
    lanes = {name: terms.get(name, STANDARD) for name in held}
    last = max((lane.priority for lane in lanes.values()), default=priority)
    shares = [lane.min_share for lane in lanes.values() if lane.priority == last]
    # If the last level has several lanes, the engine may take everything from the one with a share.
    displaces = priority < last and (len(shares) == 1 or not any(shares))
    num_jobs, num_tokens = whole.max_jobs, whole.max_tokens
    for name, lane in lanes.items():
        kept = held[name]
        if displaces and lane.priority == last:
            kept = _guaranteed(kept, lane.min_share, whole)
        num_jobs -= kept.max_jobs
        num_tokens -= kept.max_tokens
    return LaneRoom(num_jobs, num_tokens, _num_deficit_places(asking, terms, held, whole))


def _num_deficit_places(
    asking: str, terms: Mapping[str, Lane], held: Mapping[str, LaneRoom], whole: LaneRoom
) -> int:
    """Places of the lane that may be filled out of turn because of a deficit of its share.

    In the lane that the engine displaces first, a job beyond the guaranteed places would be
    displaced before it ran.
    """
    lane = terms[asking]
    others = [terms.get(name, STANDARD).priority for name in held if name != asking]
    is_first = lane.priority == min(other.priority for other in terms.values())
    if is_first or max(others, default=-1) >= lane.priority:
        return whole.max_jobs
    num_held = held[asking].max_jobs if asking in held else 0
    return max(0, _num_guaranteed(lane.min_share, whole) - num_held)


def _guaranteed(has: LaneRoom, min_share: float, whole: LaneRoom) -> LaneRoom:
    """The part of `has` that more urgent lanes may not take."""
    return LaneRoom(
        min(has.max_jobs, _num_guaranteed(min_share, whole)),
        min(has.max_tokens, math.ceil(min_share * whole.max_tokens)),
    )


def _num_guaranteed(min_share: float, whole: LaneRoom) -> int:
    """Places, always more than the exact share: with the exact share, a lane could not make up for
    a step in which one of its places was empty."""
    return math.floor(min_share * whole.max_jobs) + 1 if min_share > 0 else 0
