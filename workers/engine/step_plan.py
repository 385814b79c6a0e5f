"""One step under construction: chunks, and what is left of tokens and time.

Leaves to the scheduler who is asked, and blocks to the block manager.
"""

import math
from dataclasses import dataclass, field

from workers.engine.cost_model import CostModel, chunk_features
from workers.engine.model import Chunk
from workers.engine.running import Streams
from workers.engine.sequence import Sequence

UNLIMITED = 2**31


@dataclass(slots=True)
class StepPlan:
    """The chunks of one step, and what is left of its budget."""

    cost: CostModel
    num_tokens_left: int
    num_kept_back: int = 0  # of them, not for those who are asked now
    num_prefill_left: int = UNLIMITED  # of them, for chunks of sequences that are no streams
    seconds_left: float = math.inf
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)
    is_full: bool = False  # an overdue sequence waits for room: no one else is let in
    streams: Streams = field(default_factory=Streams)  # that ran when the step began
    streams_s: float = 0.0  # that they add to the step, where its time is limited
    _are_streams_first: bool = False  # the first chunks are the streams', of one token each
    _stream_costs: tuple[float, float] | None = None  # a token's, and a token of KV's
    num_prefix_queries: int = 0  # tokens of those admitted, and how many were found
    num_prefix_hits: int = 0

    @property
    def num_on_offer(self) -> int:
        return self.num_tokens_left - self.num_kept_back

    def num_planned(self, sequence: Sequence) -> int:
        chunk = self.chunks.get(sequence)
        return 0 if chunk is None else chunk.num_tokens

    def is_copy(self, sequence: Sequence) -> bool:
        """Whether it begins in this step with a copy of another's block."""
        chunk = self.chunks.get(sequence)
        return chunk is not None and chunk.copy_from is not None

    def num_allowed(self, num_pending: int, start: int, *, is_due: bool) -> int:
        """Tokens that the step still has for a sequence; what `is_due` waits for no time."""
        num_allowed = min(num_pending, self.num_on_offer)
        if num_pending > 1:
            num_allowed = min(num_allowed, self.num_prefill_left)
        if self.seconds_left < math.inf and not is_due:
            num_allowed = min(num_allowed, self.cost.max_tokens(self.seconds_left, start))
        return max(0, num_allowed)

    @property
    def num_for_prompts(self) -> int:
        """Tokens that a new sequence could get."""
        num_tokens = min(self.num_on_offer, self.num_prefill_left)
        if self.seconds_left < math.inf:
            num_tokens = min(num_tokens, self.cost.max_tokens(self.seconds_left, 0))
        return max(0, num_tokens)

    def put(self, sequence: Sequence, num_tokens: int, copy_from: int | None = None) -> None:
        """Gives the sequence its next tokens, behind those that it was given before."""
        num_before = self.num_planned(sequence)
        if num_before:
            copy_from = self.chunks[sequence].copy_from
        self._book(sequence, num_before, -1)
        num_all = num_before + num_tokens
        samples = num_all == sequence.num_pending
        self.chunks[sequence] = Chunk(sequence, sequence.num_computed, num_all, samples, copy_from)
        self._book(sequence, num_all, 1)

    def has_time_for(self, stream: Sequence) -> bool:
        """Whether the one token of a stream fits into the time, where a target limits the step."""
        if self.seconds_left == math.inf:
            return True
        return self._stream_s(stream.num_computed) <= self.seconds_left

    def put_streams(self) -> None:
        """`put_stream` of all streams, before anyone else; they have the time together."""
        self.chunks = {s: Chunk(s, s.num_computed, 1, True) for s in self.streams.sequences}
        self.num_tokens_left -= len(self.chunks)
        self.seconds_left -= self.streams_s
        self._are_streams_first = True

    @property
    def served_together(self) -> Streams:
        """Those whose chunks need no look: one token each, which nobody has computed before."""
        return self.streams if self._are_streams_first else Streams()

    @property
    def served_singly(self) -> list[Chunk]:
        """All other chunks."""
        return list(self.chunks.values())[len(self.served_together.sequences) :]

    def put_stream(self, sequence: Sequence) -> None:
        """`put` of the one token of a stream, which most chunks are."""
        start = sequence.num_computed
        self.chunks[sequence] = Chunk(sequence, start, 1, True)
        self.num_tokens_left -= 1
        if self.seconds_left < math.inf:
            self.seconds_left -= self._stream_s(start)

    def _stream_s(self, start: int) -> float:
        """Seconds that a stream's token adds to the step."""
        if self._stream_costs is None:
            _, b, c, _ = self.cost.coefficients
            self._stream_costs = b, c
        return self._stream_costs[0] + self._stream_costs[1] * (start + 1)

    def take_back(self, sequence: Sequence) -> None:
        """The sequence is preempted: its tokens are for others, and it comes back in no case."""
        self.preempted.add(sequence)
        if self._are_streams_first and sequence in self.streams.sequences:
            self.streams = self.streams.without(sequence)
        self._book(sequence, self.num_planned(sequence), -1)
        self.chunks.pop(sequence, None)

    def lift_limits(self) -> None:
        """Leaves the token budget alone: better a slow step than none."""
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
