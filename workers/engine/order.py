"""The order in which one step serves running and waiting sequences."""

import math
from collections.abc import Collection, Iterator

from workers.engine.lanes import Lanes
from workers.engine.policies import Policy
from workers.engine.sequence import Sequence
from workers.engine.waiting_queue import Rank, WaitingQueue


class Order:
    """Orders by level, then running before waiting, streams before prompts, then by policy.

    So a long prompt does not delay a stream of its own level. The order is fixed when the step
    begins: sequences that are admitted or preempted in the step keep their place.
    """

    def __init__(
        self,
        running: Collection[Sequence],
        queue: WaitingQueue,
        lanes: Lanes,
        policy: Policy,
        now_s: float,
    ) -> None:
        self.includes_waiting = True  # otherwise only running ones, and those that just ran
        self._queue = queue
        self._now_s = now_s
        self._admitted: list[tuple[Rank, Sequence]] = []
        level, key = lanes.level, policy.key
        self._running: list[tuple[Rank, Sequence]] = [
            ((level(s), False, s.num_pending > 1, key(s, now_s), s.arrival, 0), s) for s in running
        ]
        self._running.sort(key=_rank_of)

    def walk(self, lane: str | None = None, until: float = math.inf) -> Iterator[Sequence]:
        """Yields the sequences of a lane, or of all lanes, below a level. The caller may admit a
        waiting one when it is yielded."""
        self._merge_admitted()
        waiting = (
            self._queue.ordered(self._now_s, lane, until) if self.includes_waiting else iter(())
        )
        head = next(waiting, None)
        for rank, sequence in self._running:
            if rank[0] >= until:
                break
            if lane is not None and sequence.lane != lane:
                continue
            while head is not None and self.includes_waiting and head[0] < rank:
                yield from self._offer(head)
                head = next(waiting, None) if self.includes_waiting else None
            yield sequence
        while head is not None and self.includes_waiting:
            yield from self._offer(head)
            head = next(waiting, None) if self.includes_waiting else None

    def _offer(self, head: tuple[Rank, Sequence]) -> Iterator[Sequence]:
        yield head[1]
        if not self._queue.is_queued(head[1]):
            self._admitted.append(head)

    def _merge_admitted(self) -> None:
        """Moves what was admitted on an earlier walk to the running sequences."""
        if self._admitted:
            self._running += self._admitted
            self._running.sort(key=_rank_of)
            self._admitted = []


def _rank_of(entry: tuple[Rank, Sequence]) -> Rank:
    return entry[0]
