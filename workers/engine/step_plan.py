"""One step under construction: its chunks and the remaining tokens and time."""

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.engine.cost_model import CostModel, chunk_features
from workers.engine.interface import Chunk
from workers.engine.running import Streams
from workers.engine.sequence import Sequence

UNLIMITED = 2**31


@dataclass(slots=True)
class StepPlan:
    """The chunks of one step, and what is left of its budget."""

    cost: CostModel
    num_tokens_left: int
    num_kept_back: int = 0  # part of the budget reserved for others
    num_prefill_left: int = UNLIMITED  # part of the budget for prompts
    seconds_left: float = math.inf
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)
    is_full: bool = False  # an overdue sequence waits for room: admit no one else
    streams: Streams = field(default_factory=Streams)  # running when the step began
    streams_s: float = 0.0  # time they add to the step, if its time is limited
    has_due_streams: bool = False  # of lanes with a latency target
    _are_streams_first: bool = False  # the first chunks are the streams', one token each
    _stream_costs: tuple[float, float] | None = None  # cost of a token and of a KV token
    num_prefix_queries: int = 0  # tokens of admitted sequences, and how many were cached
    num_prefix_hits: int = 0

    @property
    def num_on_offer(self) -> int:
        return self.num_tokens_left - self.num_kept_back

    def num_planned(self, sequence: Sequence) -> int:
        chunk = self.chunks.get(sequence)
        return 0 if chunk is None else chunk.num_tokens

    def is_copy(self, sequence: Sequence) -> bool:
        """Whether it starts in this step with a copy of another's block."""
        chunk = self.chunks.get(sequence)
        return chunk is not None and chunk.copy_from is not None

    def num_allowed(self, num_pending: int, start: int, *, is_due: bool) -> int:
        """Tokens left in the step for a sequence; one that `is_due` ignores the time limit."""
        num_allowed = min(num_pending, self.num_on_offer)
        if num_pending > 1:
            num_allowed = min(num_allowed, self.num_prefill_left)
        if self.seconds_left < math.inf and not is_due:
            num_allowed = min(num_allowed, self.cost.max_tokens(self.seconds_left, start))
        return max(0, num_allowed)

    def num_for_prompts(self, *, is_due: bool) -> int:
        """Tokens available to a new sequence; one that `is_due` ignores the time limit."""
        num_tokens = min(self.num_on_offer, self.num_prefill_left)
        if self.seconds_left < math.inf and not is_due:
            num_tokens = min(num_tokens, self.cost.max_tokens(self.seconds_left, 0))
        return max(0, num_tokens)

    def put(self, sequence: Sequence, num_tokens: int, copy_from: int | None = None) -> None:
        """Gives the sequence its next tokens."""
        num_before = self.num_planned(sequence)
        if num_before:
            copy_from = self.chunks[sequence].copy_from
        self._book(sequence, num_before, -1)
        num_all = num_before + num_tokens
        samples = num_all == sequence.num_pending
        self.chunks[sequence] = Chunk(sequence, sequence.num_computed, num_all, samples, copy_from)
        self._book(sequence, num_all, 1)

    def has_time_for(self, stream: Sequence) -> bool:
        """Whether a stream's token fits into the step's time limit, if any."""
        if self.seconds_left == math.inf:
            return True
        return self._stream_s(stream.num_computed) <= self.seconds_left

    def put_streams(self) -> None:
        """Adds all streams first; they share the time."""
        self.chunks = {s: Chunk(s, s.num_computed, 1, True) for s in self.streams.sequences}
        self.num_tokens_left -= len(self.chunks)
        self.seconds_left -= self.streams_s
        self._are_streams_first = True

    @property
    def served_together(self) -> Streams:
        """Streams processed together: one token each, never computed before."""
        return self.streams if self._are_streams_first else Streams()

    @property
    def served_singly(self) -> list[Chunk]:
        """All other chunks."""
        return list(self.chunks.values())[len(self.served_together.sequences) :]

    def put_stream(self, sequence: Sequence) -> None:
        """Does `put` for a stream's one token, the most common chunk."""
        start = sequence.num_computed
        self.chunks[sequence] = Chunk(sequence, start, 1, True)
        self.num_tokens_left -= 1
        if self.seconds_left < math.inf:
            self.seconds_left -= self._stream_s(start)

    def put_drafts(self, drafts: Mapping[Sequence, Seq[int]]) -> None:
        """Adds drafted tokens to streams that have their token in the step."""
        if self._are_streams_first:
            self.streams = self.streams.without(drafts)
        for sequence, token_ids in drafts.items():
            chunk = self.chunks.pop(sequence)  # put behind those that are served together
            ends = range(1, len(token_ids) + 1)
            drafted = tuple([sequence.with_draft(token_ids[:end]) for end in ends])
            self.chunks[sequence] = Chunk(
                sequence, chunk.start, chunk.num_tokens + len(drafted), True, drafts=drafted
            )
            self.num_tokens_left -= len(drafted)

    def _stream_s(self, start: int) -> float:
        """Seconds that a stream's token adds to the step."""
        if self._stream_costs is None:
            _, b, c, _ = self.cost.coefficients
            self._stream_costs = b, c
        return self._stream_costs[0] + self._stream_costs[1] * (start + 1)

    def take_back(self, sequence: Sequence) -> None:
        """Returns a preempted sequence's tokens to the step; it cannot run in this step again."""
        self.preempted.add(sequence)
        if self._are_streams_first and sequence in self.streams.sequences:
            self.streams = self.streams.without((sequence,))
        self._book(sequence, self.num_planned(sequence), -1)
        self.chunks.pop(sequence, None)

    def put_off(self, late: Collection[Sequence]) -> None:
        """Counts the last known tokens of these as not computed: no token was drawn for them."""
        if self._are_streams_first:
            self.streams = self.streams.without([s for s in self.streams.sequences if s in late])
        for sequence in late:
            chunk = self.chunks.pop(sequence)
            if chunk.num_known > 1:
                self.chunks[sequence] = Chunk(sequence, chunk.start, chunk.num_known - 1, False)

    def lift_limits(self) -> None:
        """Drops all limits but the token budget: a slow step is better than none."""
        self.seconds_left, self.num_prefill_left = math.inf, UNLIMITED

    def _book(self, sequence: Sequence, num_tokens: int, sign: int) -> None:
        if num_tokens == 0:
            return
        self.num_tokens_left -= sign * num_tokens
        if sequence.num_pending > 1:
            self.num_prefill_left -= sign * num_tokens
        if self.seconds_left < math.inf:
            features = chunk_features(sequence.num_computed, num_tokens)
            self.seconds_left -= sign * self.cost.predict_added(features)
