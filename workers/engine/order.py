"""In which order one step serves: all who run, and of those who wait as many as are asked for."""

import math
from collections.abc import Collection, Iterator

from workers.engine.lanes import Lanes
from workers.engine.policies import Policy
from workers.engine.sequence import Sequence
from workers.engine.waiting_queue import Rank, WaitingQueue


class Order:
    """By level, running before waiting, streams before prompts, by policy.

    A long prompt must not delay a stream of its own level. The order is that of the step's
    beginning: who is let in, or loses its blocks, keeps its place.
    """

    def __init__(
        self,
        running: Collection[Sequence],
        line: WaitingQueue,
        lanes: Lanes,
        policy: Policy,
        now_s: float,
    ) -> None:
        self.names_waiting = True  # or those alone who run, or ran
        self._line = line
        self._now_s = now_s
        self._admitted: list[tuple[Rank, Sequence]] = []
        level, key = lanes.level, policy.key
        self._running: list[tuple[Rank, Sequence]] = [
            ((level(s), False, s.num_pending > 1, key(s, now_s), s.arrival, 0), s) for s in running
        ]
        self._running.sort(key=_rank_of)

    def walk(self, lane: str | None = None, until: float = math.inf) -> Iterator[Sequence]:
        """All of a lane, or of all lanes, below a level; each waiting one may be let in when it is
        named.
        """
        self._take_in()
        waiting = self._line.ordered(self._now_s, lane, until) if self.names_waiting else iter(())
        asking = next(waiting, None)
        for rank, sequence in self._running:
            if rank[0] >= until:
                break
            if lane is not None and sequence.lane != lane:
                continue
            while asking is not None and self.names_waiting and asking[0] < rank:
                yield from self._named(asking)
                asking = next(waiting, None) if self.names_waiting else None
            yield sequence
        while asking is not None and self.names_waiting:
            yield from self._named(asking)
            asking = next(waiting, None) if self.names_waiting else None

    def _named(self, asking: tuple[Rank, Sequence]) -> Iterator[Sequence]:
        yield asking[1]
        if not self._line.is_queued(asking[1]):
            self._admitted.append(asking)

    def _take_in(self) -> None:
        """Who was let in on an earlier walk stands among those who run."""
        if self._admitted:
            self._running += self._admitted
            self._running.sort(key=_rank_of)
            self._admitted = []


def _rank_of(entry: tuple[Rank, Sequence]) -> Rank:
    return entry[0]
