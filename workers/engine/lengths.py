"""How long outputs become: from the lengths of recent ones of the same tenant and lane.

After LightLLM's Past-Future scheduler (ASPLOS 2025): what has ended says how what runs will end.
Leaves to the scheduler what is done with a prediction.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from typing import Protocol

from workers.engine.sequence import Sequence

_MAX_NUM_HISTORIES = 1024
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, spread evenly


class LengthPredictor(Protocol):
    """Predicts lengths of outputs, in tokens."""

    def predict(self, sequence: Sequence) -> int:
        """Output tokens the sequence will have in all: at least those it has."""
        ...

    def observe(self, sequence: Sequence) -> None:
        """The sequence has ended by itself."""
        ...


class KnownOnly:
    """No output goes on: admission by the tokens known now, which memory pressure corrects."""

    def predict(self, sequence: Sequence) -> int:
        return sequence.num_output

    def observe(self, sequence: Sequence) -> None:
        pass


class RecentLengths:
    """Draws from the lengths recently seen of (tenant, lane), given what is already there.

    Each sequence draws at a place of its own, evenly spread over all sequences, so that sums
    come out right without a random generator. Who outlives all that was seen is thought to be
    halfway. A history with too few ends passes the question on: to the lane's, then to all. While
    nothing is known, nothing is reserved: preemption mends what that costs, and an engine that
    reserved every caller's cap would start with few. What the caller's `max_tokens` and the
    context allow is never exceeded.
    """

    def __init__(self, num_kept: int = 512, num_needed: int = 8) -> None:
        self._num_kept = num_kept
        self._num_needed = num_needed
        self._histories: OrderedDict[tuple[str, ...], _History] = OrderedDict()
        self._telling: dict[tuple[str, ...], _History] = {}  # those with ends enough

    def predict(self, sequence: Sequence) -> int:
        num_output = len(sequence.token_ids) - sequence.num_prompt
        history = (
            self._telling.get((sequence.lane, sequence.tenant))
            or self._telling.get((sequence.lane,))
            or self._telling.get(())
        )
        if history is None:
            return num_output
        place = (sequence.arrival + 1) * _GOLDEN % 1.0
        return min(sequence.max_output, history.draw(place, over=num_output))

    def observe(self, sequence: Sequence) -> None:
        for names in ((sequence.lane, sequence.tenant), (sequence.lane,), ()):
            history = self._histories.get(names)
            if history is None:
                history = self._histories[names] = _History(self._num_kept)
            history.add(sequence.num_output)
            self._histories.move_to_end(names)
            if history.num_seen >= self._num_needed:
                self._telling[names] = history
        while len(self._histories) > _MAX_NUM_HISTORIES:
            oldest, _ = self._histories.popitem(last=False)
            self._telling.pop(oldest, None)


class _History:
    """The last lengths, in order of time and of size."""

    def __init__(self, num_kept: int) -> None:
        self._recent: deque[int] = deque(maxlen=num_kept)
        self._sorted: list[int] = []

    @property
    def num_seen(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)

    def draw(self, place: float, over: int) -> int:
        """The length at `place`, from 0 to below 1, among those over `over`."""
        first = bisect_right(self._sorted, over)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return 2 * over + 1
        return self._sorted[first + int(place * num_longer)]
