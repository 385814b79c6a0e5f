"""Predicts output lengths from recent ones of the same tenant and lane, and from these the most
blocks that the running sequences will need.

After LightLLM's Past-Future scheduler (ASPLOS 2025)."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import NamedTuple

from workers.engine.block_manager import BlockManager
from workers.engine.sequence import Sequence

_MAX_NUM_HISTORIES = 1024
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are evenly spread


class RecentLengths:
    """Samples from recent output lengths of (tenant, lane) that exceed the current output.

    Each sequence samples at its own fixed quantile, spread evenly over sequences, so that sums are
    right without a random generator. A sequence longer than all recorded ones is predicted to be
    halfway. With too few records the lane's history is used, then the global one. Without any,
    nothing is reserved: preemption corrects that. `max_tokens` and the context are never exceeded.

    A length that the caller expects raises the prediction.
    """

    def __init__(self, num_kept: int = 512, num_needed: int = 8) -> None:
        self._num_kept = num_kept
        self._num_needed = num_needed
        self._histories: OrderedDict[tuple[str, ...], _History] = OrderedDict()
        self._telling: dict[tuple[str, ...], _History] = {}  # those with enough records

    def predict(self, sequence: Sequence) -> int:
        """Total output tokens of the sequence, at least those it has."""
        num_output = len(sequence.token_ids) - sequence.num_prompt
        told = num_output
        if expected := sequence.params.expected_tokens:
            longer = expected if expected > num_output else 2 * num_output + 1
            told = min(sequence.max_output, longer)
        history = (
            self._telling.get((sequence.lane, sequence.tenant))
            or self._telling.get((sequence.lane,))
            or self._telling.get(())
        )
        if history is None:
            return told
        place = (sequence.arrival + 1) * _GOLDEN % 1.0
        return max(told, min(sequence.max_output, history.draw(place, over=num_output)))

    def observe(self, sequence: Sequence) -> None:
        """Learns from a sequence that ended by itself."""
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


class Need(NamedTuple):
    """Blocks of a sequence's known tokens, and how it is predicted to grow."""

    num_more: int  # tokens
    num_blocks: int
    num_spare: int  # slots that its known tokens leave in their last block


class KVForecast:
    """The needs of the running sequences at one moment.

    Created in every step that admits a sequence. It looks at each running sequence once, and again
    only if all of them at their longest would not fit.
    """

    def __init__(
        self, blocks: BlockManager, lengths: RecentLengths, running: Collection[Sequence]
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._running = set(running)
        self._entered: dict[Sequence, Need] = {}  # admitted in this step
        num_blocks, num_full, size = 0, 0, blocks.block_size
        for sequence in running:
            num_blocks += -(-len(sequence.token_ids) // size)
            num_full += -(-self._foresee(sequence) // size)
        self._num_blocks = num_blocks
        self._num_full = num_full  # an upper bound: all at their ends at once
        self._num_shared = blocks.num_shared  # shared blocks count once

    def _foresee(self, sequence: Sequence) -> int:
        """Its total tokens; predicts them again if it has reached its earlier prediction."""
        if sequence.num_foreseen <= len(sequence.token_ids):
            sequence.num_foreseen = sequence.num_prompt + self._lengths.predict(sequence)
        return sequence.num_foreseen

    def need(self, sequence: Sequence, num_held: int = 0) -> Need:
        """The need of a sequence that already has `num_held` blocks."""
        num_known = len(sequence.token_ids)
        num_blocks = self._blocks.num_blocks_for(num_known)
        num_spare = num_blocks * self._blocks.block_size - num_known
        return Need(self._foresee(sequence) - num_known, num_blocks - num_held, num_spare)

    def add(self, sequence: Sequence, need: Need) -> None:
        """Adds a sequence that runs from here on."""
        self._running.add(sequence)
        self._entered[sequence] = need
        self._num_blocks += need.num_blocks
        self._num_full += self._num_full_of(need)

    def drop(self, sequence: Sequence) -> None:
        """Drops a sequence that will lose its blocks."""
        if sequence in self._running:
            need = self._need_of(sequence)
            self._running.discard(sequence)
            self._num_blocks -= need.num_blocks
            self._num_full -= self._num_full_of(need)
            self._num_shared -= len(sequence.block_ids) - self._blocks.num_private(sequence)

    def _need_of(self, running: Sequence) -> Need:
        """The need as counted; it does not change within a step."""
        return self._entered.get(running) or self.need(running)

    def num_blocks_of(self, running: Sequence) -> int:
        """A running sequence's blocks of known tokens."""
        return self._need_of(running).num_blocks

    def num_known(self, new: Need) -> int:
        """Blocks of all known tokens including `new`."""
        return self._num_blocks + new.num_blocks - self._num_shared

    def num_at_most(self, new: Need) -> int:
        """An upper bound of `peak` for any yielding sequences."""
        return self._num_full + self._num_full_of(new) - self._num_shared

    def peak(self, new: Need, yielding: Collection[Sequence]) -> int:
        """The maximum number of blocks over time, if yielding sequences stop growing and leave
        first.

        When a sequence ends, all that last longer have as many more tokens as it had, so the
        maximum is reached at the end of one of them.
        """
        needs = [self._need_of(s) for s in self._running if s not in yielding]
        needs.append(new)
        needs.sort(reverse=True)
        num_peak = num_blocks = 0
        spare: list[int] = []  # of those that last as long, sorted
        for need in needs:
            num_blocks += need.num_blocks
            insort(spare, need.num_spare)
            num_each, num_left = divmod(need.num_more, self._blocks.block_size)
            num_grown = num_each * len(spare) + bisect_left(spare, num_left)
            num_peak = max(num_peak, num_blocks + num_grown)
        return num_peak - self._num_shared

    def _num_full_of(self, need: Need) -> int:
        """The number of blocks at its predicted end."""
        return need.num_blocks + self._blocks.num_blocks_for(need.num_more - need.num_spare)
