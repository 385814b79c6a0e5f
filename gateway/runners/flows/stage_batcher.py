"""How many of a pipeline stage's waiting calls to send. Sends nothing, and has no clock.

Batches of a size picked for each stage from its own latency curve are an idea of Clipper (Crankshaw
and others, NSDI 2017), which found latency linear in the size of a batch, and of InferLine (SoCC
2020), which profiles each stage of a pipeline. Here the line is fitted to the calls themselves.
"""

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
    """Decides for one stage of a flow, in one process."""

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
