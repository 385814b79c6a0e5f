"""Batching strategies: which waiting sequences start together, and when; and the batches that they
have started, with the padding of those that are computed as rectangles.

A strategy changes when a sequence runs, never its output. Padding is computed for a fair
comparison: in a rectangle prompts are padded to the longest, and rows that have ended continue with
one token per step until the batch ends."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from workers.engine.interface import Chunk, Padding
from workers.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class AdmittedBatch:
    """Sequences admitted together; `sequences` are those that have not ended."""

    sequences: dict[Sequence, None]
    num_rows: int  # sequences when it was admitted


@dataclass(frozen=True, slots=True)
class Waiting:
    """One strategy's waiting sequences and open batches."""

    now_s: float
    sequences: list[Sequence]  # in the policy's order
    since_s: Mapping[Sequence, float]  # when each came
    batches: Collection[AdmittedBatch]

    def first_since_s(self, sequences: Collection[Sequence]) -> float:
        """When the first of them entered."""
        return min(self.since_s[sequence] for sequence in sequences)


class Strategy(Protocol):
    """Hashable by its parameters: lanes with equal strategies share batches."""

    @property
    def is_padded(self) -> bool:
        """Whether its batches are computed as rectangles."""

    def next_batch(self, waiting: Waiting) -> list[Sequence]:
        """Those of `waiting.sequences` to admit together now; empty if all must wait. Called again
        until it returns none. Must not return none for ever while `waiting.batches` is empty.
        """

    def wake_s(self, waiting: Waiting) -> float | None:
        """When `next_batch` will admit more without arrivals or ends."""


@dataclass(frozen=True, slots=True)
class Strategies:
    default: Strategy
    by_lane: Mapping[str, Strategy] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, sequence: Sequence) -> Strategy:
        return self.by_lane.get(sequence.lane, self.default)


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, 2024)."""

    is_padded: bool = False  # continuous batches are never padded

    def next_batch(self, waiting: Waiting) -> list[Sequence]:
        return waiting.sequences

    def wake_s(self, waiting: Waiting) -> float | None:
        return waiting.first_since_s(waiting.sequences)


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """Starts a batch of `batch_size` sequences, or a smaller one after the first has waited
    `max_wait_s`.

    The next batch starts when at most `drain_share` of every earlier batch still runs; at 0, when
    the batch before has ended.
    """

    batch_size: int = 8
    max_wait_s: float = 1.0
    drain_share: float = 0.0
    is_padded: bool = False

    def next_batch(self, waiting: Waiting) -> list[Sequence]:
        wake_s = self.wake_s(waiting)
        if wake_s is None or not waiting.sequences:
            return []
        if len(waiting.sequences) < self.batch_size and waiting.now_s < wake_s:
            return []
        return waiting.sequences[: self.batch_size]

    def wake_s(self, waiting: Waiting) -> float | None:
        if not waiting.sequences or any(
            len(batch.sequences) / batch.num_rows > self.drain_share for batch in waiting.batches
        ):
            return None
        return waiting.first_since_s(waiting.sequences) + self.max_wait_s


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Starts a batch when it is full, or `window_s` after its first sequence arrived.

    Batches run concurrently. With `bucket_edges`, for example (64, 256), a batch contains prompts
    of one bucket only (here up to 64 tokens, up to 256, and longer), which limits its padding.
    """

    batch_size: int = 8
    window_s: float = 0.02
    bucket_edges: tuple[int, ...] = ()  # tokens, ascending
    is_padded: bool = False

    def next_batch(self, waiting: Waiting) -> list[Sequence]:
        for bucket in self._buckets(waiting):
            is_over = waiting.now_s >= waiting.first_since_s(bucket) + self.window_s
            if is_over or len(bucket) >= self.batch_size:
                return bucket[: self.batch_size]
        return []

    def wake_s(self, waiting: Waiting) -> float | None:
        return (
            waiting.first_since_s(waiting.sequences) + self.window_s if waiting.sequences else None
        )

    def _buckets(self, waiting: Waiting) -> list[list[Sequence]]:
        """Waiting sequences by bucket, in the policy's order; the first sequence's bucket leads."""
        buckets: dict[int, list[Sequence]] = {}
        for sequence in waiting.sequences:
            bucket = bisect_left(self.bucket_edges, sequence.num_known)
            buckets.setdefault(bucket, []).append(sequence)
        return list(buckets.values())


class PaddingDebt:
    """Pad tokens that are due; they come first in a step's budget.

    A rectangle yields tokens only when it is computed completely; what exceeds a step's budget is
    carried over to the next.
    """

    def __init__(self) -> None:
        self._due = deque[Padding]()

    def owe_prompts(self, batch: AdmittedBatch) -> None:
        """Pads a new batch's rows to the longest prompt."""
        longest = max(sequence.num_known for sequence in batch.sequences)
        for sequence in batch.sequences:
            if sequence.num_known < longest:
                self._due.append(Padding(sequence.num_known, longest - sequence.num_known))

    def owe_rows(self, batches: Seq[AdmittedBatch], chunks: Collection[Chunk]) -> None:
        """Continues ended rows of batches that sample in this step."""
        for batch in batches:
            num_ended = batch.num_rows - len(batch.sequences)
            lasts = [
                chunk.start + chunk.num_tokens - 1
                for chunk in chunks
                if chunk.samples and chunk.sequence in batch.sequences
            ]
            if num_ended and lasts:
                self._due.extend([Padding(max(lasts), 1)] * num_ended)

    def pay(self, num_tokens: int) -> list[Padding]:
        """Takes up to `num_tokens` due tokens."""
        paid: list[Padding] = []
        while self._due and num_tokens > 0:
            first = self._due.popleft()
            now = min(first.num_tokens, num_tokens)
            paid.append(Padding(first.start, now))
            if now < first.num_tokens:
                self._due.appendleft(Padding(first.start + now, first.num_tokens - now))
            num_tokens -= now
        return paid

    def clear(self) -> None:
        self._due.clear()


def num_tokens_of(padding: Seq[Padding]) -> int:
    return sum(pad.num_tokens for pad in padding)


class StrategyBatches:
    """The waiting and the open batches of every strategy.

    A preempted sequence stays in its batch.
    """

    def __init__(self, strategies: Strategies, max_num_rows: int) -> None:
        """`max_num_rows` limits the rows of all padded batches, including rows that have ended."""
        self._strategies = strategies
        self._max_num_rows = max_num_rows
        self._debt = PaddingDebt()
        self._has_changed = True  # ask the strategies once before they wake
        self._wake_s: float | None = None
        self._new: dict[Sequence, None] = {}
        self._since_s: dict[Sequence, float] = {}
        self._batch_of: dict[Sequence, AdmittedBatch] = {}
        self._open: dict[Strategy, dict[AdmittedBatch, None]] = {}

    @property
    def num_admitted(self) -> int:
        """Admitted sequences that have not ended."""
        return len(self._batch_of)

    def reconfigure(self, strategies: Strategies, max_num_rows: int) -> None:
        """Applies new strategies; open batches stay open until they end."""
        self._strategies, self._max_num_rows = strategies, max_num_rows
        self._has_changed = True

    def add(self, sequence: Sequence) -> None:
        self._new[sequence] = None
        self._has_changed = True

    def note_move(self) -> None:
        """A sequence moved to another lane, and perhaps to another strategy."""
        self._has_changed = True

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended or was stopped; its batch ends with the last one."""
        self._has_changed = True
        self._new.pop(sequence, None)
        self._since_s.pop(sequence, None)
        batch = self._batch_of.pop(sequence, None)
        if batch is None:
            return
        del batch.sequences[sequence]
        if not batch.sequences:
            self._close(batch)

    def admit(self, key: Callable[[Sequence], tuple[float, ...]], now_s: float) -> list[Sequence]:
        """Opens the batches that the strategies form now, and returns their sequences. `key` orders
        the waiting sequences. Strategies are asked only after a change or when they wake, to avoid
        sorting the waiting at every step."""
        if not self._has_changed and (self._wake_s is None or now_s < self._wake_s):
            return []
        self._since_s |= dict.fromkeys(self._new, now_s)
        self._new.clear()
        entered: list[Sequence] = []
        wakes_s: list[float | None] = []
        for strategy, waiting in self._waiting().items():
            waiting.sort(key=key)
            while chosen := strategy.next_batch(self._waiting_of(strategy, waiting, now_s)):
                if strategy.is_padded and not self._has_rows(len(chosen)):
                    break
                self._open_batch(strategy, chosen)
                entered += chosen
                waiting = [s for s in waiting if s in self._since_s]
            if waiting:
                wakes_s.append(strategy.wake_s(self._waiting_of(strategy, waiting, now_s)))
        self._wake_s = _earliest(wakes_s)
        self._has_changed = False
        return entered

    def wake_s(self, now_s: float) -> float | None:
        """When a strategy will admit more without arrivals or ends; None for never."""
        if self._new:
            return now_s
        wakes_s: list[float | None] = []
        for strategy, sequences in self._waiting().items():
            waiting = self._waiting_of(strategy, sequences, now_s)
            wakes_s.append(now_s if strategy.next_batch(waiting) else strategy.wake_s(waiting))
        return _earliest(wakes_s)

    def padding_due(self, num_tokens: int) -> list[Padding]:
        """Padding that earlier steps had no tokens for, limited to `num_tokens`."""
        return self._debt.pay(num_tokens)

    def padding_beside(self, chunks: Collection[Chunk], num_tokens: int) -> list[Padding]:
        """The padding of padded batches with these chunks, limited to `num_tokens`."""
        self._debt.owe_rows(self._padded(), chunks)
        return self._debt.pay(num_tokens)

    def _padded(self) -> list[AdmittedBatch]:
        return [
            batch for strategy in self._open if strategy.is_padded for batch in self._open[strategy]
        ]

    def _waiting(self) -> dict[Strategy, list[Sequence]]:
        waiting: dict[Strategy, list[Sequence]] = {}
        for sequence in self._since_s:
            waiting.setdefault(self._strategies.of(sequence), []).append(sequence)
        return waiting

    def _waiting_of(self, strategy: Strategy, waiting: list[Sequence], now_s: float) -> Waiting:
        return Waiting(now_s, waiting, self._since_s, self._open.get(strategy, {}).keys())

    def _has_rows(self, num_rows: int) -> bool:
        """Whether the rows fit beside those of open padded batches; the first batch always fits."""
        num_held = sum(batch.num_rows for batch in self._padded())
        return num_held == 0 or num_held + num_rows <= self._max_num_rows

    def _open_batch(self, strategy: Strategy, chosen: list[Sequence]) -> None:
        batch = AdmittedBatch(dict.fromkeys(chosen), len(chosen))
        self._open.setdefault(strategy, {})[batch] = None
        for sequence in chosen:
            del self._since_s[sequence]
            self._batch_of[sequence] = batch
        if strategy.is_padded:
            self._debt.owe_prompts(batch)

    def _close(self, batch: AdmittedBatch) -> None:
        for strategy, open_ in list(self._open.items()):
            open_.pop(batch, None)
            if not open_:
                del self._open[strategy]
        if not self._open:
            self._debt.clear()


def _earliest(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)
