"""Predicts output lengths from recent ones of the same tenant and lane.

After LightLLM's Past-Future scheduler (ASPLOS 2025).
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from typing import Protocol

from workers.engine.sequence import Sequence

_MAX_NUM_HISTORIES = 1024
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are evenly spread


class LengthPredictor(Protocol):
    """Predicts lengths of outputs, in tokens."""

    def predict(self, sequence: Sequence) -> int:
        """Total output tokens of the sequence, at least those it has."""
        ...

    def observe(self, sequence: Sequence) -> None:
        """Learns from a sequence that ended by itself."""
        ...


class KnownOnly:
    """Predicts no further output: admission counts known tokens only."""

    def predict(self, sequence: Sequence) -> int:
        return sequence.num_output

    def observe(self, sequence: Sequence) -> None:
        pass


class RecentLengths:
    """Samples from recent output lengths of (tenant, lane) that exceed the current output.

    Each sequence samples at its own fixed quantile, spread evenly over sequences, so that sums are
    right without a random generator. A sequence longer than all recorded ones is predicted to be
    halfway. With too few records the lane's history is used, then the global one. Without any,
    nothing is reserved: preemption corrects that. `max_tokens` and the context are never exceeded.

    A length that the caller expects is predicted instead.
    """

    def __init__(self, num_kept: int = 512, num_needed: int = 8) -> None:
        self._num_kept = num_kept
        self._num_needed = num_needed
        self._histories: OrderedDict[tuple[str, ...], _History] = OrderedDict()
        self._telling: dict[tuple[str, ...], _History] = {}  # those with enough records

    def predict(self, sequence: Sequence) -> int:
        num_output = len(sequence.token_ids) - sequence.num_prompt
        if expected := sequence.params.expected_tokens:
            longer = expected if expected > num_output else 2 * num_output + 1
            return min(sequence.max_output, longer)
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
    """The last lengths, ordered by time and by size."""

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
        """The length at quantile `place` (0 to below 1) among those over `over`."""
        first = bisect_right(self._sorted, over)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return 2 * over + 1
        return self._sorted[first + int(place * num_longer)]
