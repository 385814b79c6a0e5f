"""Batching strategies: which waiting sequences start together, and when.

A strategy changes when a sequence runs, never its output."""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from workers.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences admitted together; `sequences` are those that have not ended."""

    sequences: dict[Sequence, None]
    num_rows: int  # sequences when it was admitted

    @property
    def share_left(self) -> float:
        return len(self.sequences) / self.num_rows


@dataclass(frozen=True, slots=True)
class Waiting:
    """One strategy's waiting sequences and open batches."""

    now_s: float
    sequences: list[Sequence]  # in the policy's order
    since_s: Mapping[Sequence, float]  # when each came
    batches: Collection[Batch]

    def first_since_s(self, sequences: Collection[Sequence]) -> float:
        """When the first of them entered."""
        return min(self.since_s[sequence] for sequence in sequences)


class Strategy(Protocol):
    """Hashable by its parameters: lanes with equal strategies share batches."""

    @property
    def is_padded(self) -> bool:
        """Whether its batches are computed as rectangles: see `batches`."""

    def next_batch(self, waiting: Waiting) -> list[Sequence]:
        """Those of `waiting.sequences` to admit together now; empty if all must wait. Called again
        until it returns none. Must not return none for ever while `waiting.batches` is empty.
        """

    def wake_s(self, waiting: Waiting) -> float | None:
        """When `next_batch` will admit more without arrivals or ends."""


@dataclass(frozen=True, slots=True)
class Strategies:
    """The strategy of each lane."""

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
            batch.share_left > self.drain_share for batch in waiting.batches
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
