"""Holds the calls of a staged pipeline's jobs at each stage until they fill the best batch.

Batches of a size picked for each stage from its own latency curve are an idea of Clipper (Crankshaw
and others, NSDI 2017), which found latency linear in the size of a batch, and of InferLine (SoCC
2020), which profiles each stage of a pipeline. Here the line is fitted to the calls themselves.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

GROWTH = 0.1  # the best size is where twice the size adds less than this share of throughput
_DECAY = 0.98  # of a measurement's weight with each later one: the last 50 count most
_MAX_SIZE = 256  # calls of a batch
_MAX_BATCHES = 2  # of a stage, that run or wait: one to follow the one that runs


@dataclass(frozen=True, slots=True)
class Queues:
    """What a stage's decision depends on."""

    num_waiting: int  # calls of this stage that were not sent
    waited_s: float  # the oldest of them
    num_before: int  # calls in earlier stages of the flow, waiting or running
    num_under_way: int = 0  # calls of this stage that were sent and have not ended
    num_next: int = 0  # calls of the next stage, waiting or under way; 0: there is none
    next_best_size: int = 1


class StageBatcher:
    """Decides how many of a stage's waiting calls to send, in one process. Sends nothing, and has
    no clock."""

    def __init__(self) -> None:
        self._largest = 0
        # Weighted sums over measurements: of 1, size, size², seconds, size x seconds.
        self._sums = [0.0] * 5

    def ended(self, size: int, seconds: float) -> None:
        """Records a batch: its calls, and the time from sending it to its last answer."""
        self._largest = max(self._largest, size)
        terms = (1.0, size, size**2, seconds, size * seconds)
        self._sums = [_DECAY * known + term for known, term in zip(self._sums, terms, strict=True)]

    @property
    def best_size(self) -> int:
        """The size of a batch above which throughput hardly grows. At most twice the largest
        measured batch, so that the first batches try the sizes."""
        limit = min(max(2 * self._largest, 1), _MAX_SIZE)
        base_s, call_s = self._line()
        if call_s <= 0:  # a larger batch took no longer
            return limit
        # The size b where 2b / latency(2b) = (1 + GROWTH) · b / latency(b).
        size = base_s * (1 - GROWTH) / (2 * GROWTH * call_s)
        return round(min(max(size, 1.0), limit))

    def has_room(self, queues: Queues) -> bool:
        """Whether another batch may begin, in this stage and then in the next one."""
        return (
            queues.num_under_way + self.best_size <= _MAX_BATCHES * self.best_size
            and queues.num_next < _MAX_BATCHES * queues.next_best_size
        )

    def num_to_send(self, queues: Queues) -> int:
        """Returns the number of calls to send at once, as one batch; ask again after each. 0: wait
        for a change, at the latest until the oldest has waited for `hold_s`."""
        if not self.has_room(queues):
            return 0
        if queues.num_waiting >= self.best_size:
            return self.best_size
        # No call can join, or the wait has cost what a batch takes.
        if queues.num_before == 0 or queues.waited_s >= self.hold_s:
            return queues.num_waiting
        return 0

    @property
    def hold_s(self) -> float:
        """The seconds that a call waits at most for others, if the next stage has room: what a
        batch of the best size takes. 0 until a batch was measured."""
        base_s, call_s = self._line()
        return max(base_s + call_s * self.best_size, 0.0)

    def _line(self) -> tuple[float, float]:
        """Fits a line by least squares. Returns the seconds of an empty batch, and of each call in
        it. If all batches had one size, the slope is unknown and 0."""
        weight, sizes, squares, seconds, products = self._sums
        spread = weight * squares - sizes**2
        if weight == 0:
            return 0.0, 0.0
        if spread <= 1e-9 * squares * weight:
            return seconds / weight, 0.0
        call_s = (weight * products - sizes * seconds) / spread
        return (seconds - call_s * sizes) / weight, call_s


class _Batch:
    """Calls that were sent together."""

    def __init__(self, size: int, sent_s: float) -> None:
        self.size = size
        self.sent_s = sent_s
        self.num_under_way = size


class _Stage:
    def __init__(self) -> None:
        self.batcher = StageBatcher()
        self.waiting: dict[StagedJob, float] = {}  # since when, in order
        self.num_under_way = 0  # calls that were sent and have not ended
        # Start-time fair queueing (Goyal and others, SIGCOMM 1996): the start of the last call that
        # was sent, by lane, and the earliest start of a tenant's next one. In calls of weight 1.
        self.reached: dict[int, float] = {}
        self.next_starts: dict[tuple[int, str], float] = {}


class StageQueues:
    """The stages of one staged pipeline in a process. `lanes`: the most urgent first."""

    def __init__(self, num_stages: int, clock: Callable[[], float], lanes: Sequence[str]) -> None:
        self.clock = clock
        self._ranks = {lane: rank for rank, lane in enumerate(lanes)}
        self._stages = [_Stage() for _ in range(num_stages)]
        self._num_jobs = [0] * num_stages  # at each stage, waiting or running
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def staged_job(self, tenant: str, weight: float) -> Iterator["StagedJob"]:
        """A context of a job's way through the stages."""
        staged_job = StagedJob(self, tenant, weight)
        self.move(0, 1)
        try:
            yield staged_job
        finally:  # it has ended, or another process runs it
            staged_job.ended()
            self.move(staged_job.stage, -1)
            self._stages[staged_job.stage].waiting.pop(staged_job, None)
            self.look()

    def move(self, stage: int, number: int) -> None:
        """Adds `number` to the jobs at a stage."""
        self._num_jobs[stage] += number

    def wait(self, staged_job: "StagedJob") -> None:
        """Queues a job that has arrived at its stage."""
        stage = self._stages[staged_job.stage]
        lane = self._ranks.get(staged_job.lane, len(self._ranks))
        key = lane, staged_job.tenant
        start = max(stage.reached.get(lane, 0.0), stage.next_starts.get(key, 0.0))
        stage.next_starts[key] = start + 1 / staged_job.weight
        staged_job.turn = lane, start
        stage.waiting[staged_job] = self.clock()
        self.look()

    def ended(self, staged_job: "StagedJob", batch: _Batch) -> None:
        """Records that a job's call has ended."""
        self._stages[staged_job.stage].num_under_way -= 1
        batch.num_under_way -= 1
        if batch.num_under_way == 0:
            seconds = self.clock() - batch.sent_s
            self._stages[staged_job.stage].batcher.ended(batch.size, seconds)
        self.look()

    def look(self) -> None:
        """Sends the calls that are due, and looks again when the oldest has waited long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pauses = [self._send(number) for number in reversed(range(len(self._stages)))]
        if left := [pause_s for pause_s in pauses if pause_s is not None]:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.001, min(left)), self.look)

    def _send(self, number: int) -> float | None:
        """Sends batches of a stage. The seconds until the next look; None: when a call ends."""
        stage = self._stages[number]
        while stage.waiting:
            queues = self._queues(number)
            size = stage.batcher.num_to_send(queues)
            if size == 0 and not stage.batcher.has_room(queues):
                return None  # until a call ends
            if size == 0:
                return max(0.0, stage.batcher.hold_s - queues.waited_s)
            batch = _Batch(size, self.clock())
            stage.num_under_way += size
            for staged_job in heapq.nsmallest(size, stage.waiting, key=lambda each: each.turn):
                del stage.waiting[staged_job]
                lane, start = staged_job.turn
                stage.reached[lane] = start
                staged_job.send(batch)
        stage.reached.clear()  # nobody waits: no tenant is behind
        stage.next_starts.clear()
        return None

    def _queues(self, number: int) -> Queues:
        stage = self._stages[number]
        since_s = next(iter(stage.waiting.values()))
        following = self._stages[number + 1] if number + 1 < len(self._stages) else None
        return Queues(
            num_waiting=len(stage.waiting),
            waited_s=self.clock() - since_s,
            num_before=sum(self._num_jobs[:number]),
            num_under_way=stage.num_under_way,
            num_next=self._num_jobs[number + 1] if following else 0,
            next_best_size=following.batcher.best_size if following else 1,
        )


class StagedJob:
    """A job's way through the stages."""

    def __init__(self, stages: StageQueues, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.lane = ""
        self.turn = 0, 0.0  # the least is sent first
        self.stage = 0
        self._stages = stages
        self._batch: _Batch | None = None
        self._sent: asyncio.Future[None] | None = None

    async def wait_turn(self, stage: int, lane: str) -> None:
        """Returns when the job's call of this stage is to be sent."""
        self.lane = lane
        self._stages.move(self.stage, -1)
        self._stages.move(stage, 1)
        self.stage = stage
        self._sent = asyncio.get_running_loop().create_future()
        self._stages.wait(self)
        await self._sent

    def send(self, batch: _Batch) -> None:
        self._batch = batch
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def ended(self) -> None:
        """Records that the call has ended."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            self._stages.ended(self, batch)
