"""Which lane of which partition a worker serves next. Knows neither Redis nor jobs' contents.

Lanes come first, as in lua/claim.lua: one that is owed its minimum share, then the most urgent. In
a lane the partitions share as tenants do in one partition (lua/_fairness.lua): each has a counter
of claimed tokens ÷ the weight of its waiting tenants, and the lowest is served. So a tenant gets
its share by weight wherever it lives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from contract.function_types import LaneRoom

MAX_PASSED = 8  # claims in other partitions while jobs of the one that is next do not fit
_MAX_OWED = 2**20  # tokens

Line = tuple[int, str]  # partition, lane


@dataclass(frozen=True, slots=True)
class Turn:
    """A claim to make: up to `max_jobs` places of a lane in a partition; 0: only of tenants below
    their share. `share`: the partition's part of the lane, by the weights that wait."""

    line: Line
    max_jobs: int
    weight: float
    share: float


@dataclass(slots=True)
class Rotation:
    """The state of one worker. `waiting`: the weight of the tenants that wait, as last told."""

    waiting: dict[Line, float] = field(default_factory=dict)
    _counters: dict[Line, float] = field(default_factory=dict)
    _clocks: dict[str, float] = field(default_factory=dict)  # the counter served last, by lane
    _owed: dict[str, float] = field(default_factory=dict)  # tokens, by lane
    _costs: dict[str, int] = field(default_factory=dict)  # of the last job, by lane
    _misses: dict[Line, int] = field(default_factory=dict)
    _charged: dict[str, tuple[Line, int, float]] = field(default_factory=dict)  # by job

    def note_waiting(self, partition: int, weights: Mapping[str, float]) -> None:
        """What waits in a partition now: the weight of its tenants by lane."""
        for line in [line for line in self.waiting if line[0] == partition]:
            if line[1] not in weights:
                del self.waiting[line]
                self._misses.pop(line, None)
        for lane, weight in weights.items():
            line = partition, lane
            if line not in self.waiting:  # it saves no credit and loses no debt
                known = self._counters.get(line, 0.0)
                self._counters[line] = max(known, self._clocks.get(lane, 0.0))
            self.waiting[line] = weight

    def forget(self, partition: int) -> None:
        """The partition does not answer, or is gone."""
        self.note_waiting(partition, {})

    def choose(
        self,
        rooms: Mapping[str, LaneRoom],
        shares: Mapping[str, float],
        missed: Mapping[Line, LaneRoom],
    ) -> Turn | None:
        """The next claim; None where nothing waits for which there is room. `shares`: the minimum
        shares of lanes, the most urgent first. `missed`: lines of which nothing fitted, with the
        room of the lane then; such a line is chosen again once there is more."""
        served = [lane for lane in shares if lane in rooms]
        owed = [
            lane
            for lane in served
            if shares[lane] and self._owed.get(lane, 0.0) >= max(1, self._costs.get(lane, 1))
        ]
        for lane in (*owed, *served):
            lines = [line for line in self.waiting if line[1] == lane]
            lines.sort(key=lambda line: (self._counters[line], line[0]))
            left = [
                line for line in lines if line not in missed or _is_more(rooms[lane], missed[line])
            ]
            must_fit = bool(lines) and self._misses.get(lines[0], 0) >= MAX_PASSED
            if must_fit and lines[0] not in left:
                return None
            if left:
                return self._turn(left[0], rooms[lane])
        return None

    def _turn(self, line: Line, room: LaneRoom) -> Turn:
        sum_weights = sum(w for other, w in self.waiting.items() if other[1] == line[1])
        weight = self.waiting[line]
        share = weight / sum_weights
        places = min(room.max_jobs, max(1, round(room.max_jobs * share)))
        return Turn(line, places, weight, share)

    def note_claimed(
        self, turn: Turn, costs: Mapping[str, int], shares: Mapping[str, float]
    ) -> None:
        """The jobs that a turn has claimed, with their costs; none: nothing fits, or waits."""
        line, lane = turn.line, turn.line[1]
        if not costs:
            if turn.max_jobs:  # there was room
                self._misses[line] = self._misses.get(line, 0) + 1
            return
        self._misses.pop(line, None)
        self._clocks[lane] = max(self._clocks.get(lane, 0.0), self._counters[line])
        for job_id, cost in costs.items():
            self._counters[line] += cost / turn.weight
            self._charged[job_id] = line, cost, turn.weight
            self._costs[lane] = cost
            self._owe(lane, cost, shares)

    def _owe(self, served: str, cost: int, shares: Mapping[str, float]) -> None:
        """The deficit of each lane with waiting jobs grows by its share of the claimed tokens."""
        lanes = {lane for _, lane in self.waiting}
        for lane, share in shares.items():
            owed = self._owed.get(lane, 0.0) + share * cost - (cost if lane == served else 0)
            if share:
                self._owed[lane] = min(_MAX_OWED, max(0.0, owed)) if lane in lanes else 0.0

    def settle(self, job_id: str, num_tokens: int) -> None:
        """Replaces a job's cost by the tokens that it took."""
        if (charged := self._charged.pop(job_id, None)) is not None:
            line, cost, weight = charged
            self._counters[line] += (num_tokens - cost) / weight

    def share(self, partition: int) -> float:
        """The part of this worker that a new job of the partition may count on."""
        own = sum(w for line, w in self.waiting.items() if line[0] == partition) or 1.0
        others = sum(w for line, w in self.waiting.items() if line[0] != partition)
        return own / (own + others)


def _is_more(now: LaneRoom, then: LaneRoom) -> bool:
    return now.max_jobs > then.max_jobs or now.max_tokens > then.max_tokens
