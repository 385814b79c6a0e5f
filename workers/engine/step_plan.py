"""One step: under construction, with its chunks and the remaining tokens and time, and as reported
once it is computed. And the running sequences (those that hold blocks), with the streams among
them.

Streams need one token each and are most of a step's work, so they are processed together in a few
passes.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from contract.events import TokenLogprob
from contract.jobs import FinishReason
from workers.engine.cost_model import CostModel, chunk_features
from workers.engine.interface import Chunk, PromptLogprobs
from workers.engine.sequence import Account, Sequence
from workers.ipc.messages import (
    ChoiceEnded,
    EngineLoad,
    FromEngine,
    JobFailed,
    Marked,
    PrefixFound,
    PromptLogprobsOut,
    TokenOut,
    VectorOut,
)


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams in admission order; `num_kv` is their total of tokens."""

    sequences: list[Sequence] = field(default_factory=list)
    num_kv: int = 0
    num_by_account: Mapping[Account, int] = field(default_factory=dict)

    @property
    def features(self) -> tuple[float, float, float]:
        """`step_features` of one token for each stream."""
        return float(len(self.sequences)), float(self.num_kv), 0.0

    def without(self, others: Collection[Sequence]) -> "Streams":
        """The same without some of the streams."""
        sequences = [sequence for sequence in self.sequences if sequence not in others]
        num_by_account = Counter(self.num_by_account) - Counter([s.account for s in others])
        num_kv = self.num_kv - sum([s.num_known for s in others])
        return Streams(sequences, num_kv, num_by_account)


class RunningSequences:
    """The running sequences, all and by account; updated incrementally, as few change in a step."""

    def __init__(self) -> None:
        # Dicts as ordered sets: constant-time removal, deterministic iteration.
        self.sequences: dict[Sequence, None] = {}
        self.by_account: dict[Account, dict[Sequence, None]] = {}  # without empty ones
        self.num_in: Counter[str] = Counter()  # by lane; may have zeros
        self.num_changes = 0

    def weight_of(self, account: Account) -> float:
        """The weight of an account's latest running sequence."""
        return next(reversed(self.by_account[account])).weight

    def places_by_weight(self, account: Account, weight: float, more: int = 0) -> float:
        """A tenant's places in a lane, plus `more`, divided by its weight."""
        return (len(self.by_account.get(account, ())) + more) / weight

    def most_places(self, account: Account, weight: float) -> Account | None:
        """The tenant to take a place from, if it then still has no less per weight."""
        left = {
            other: self.places_by_weight(other, self.weight_of(other), -1)
            for other in self.by_account
            if other[0] == account[0] and other != account
        }
        found = max(left, key=left.__getitem__, default=None)
        if found is None or left[found] < self.places_by_weight(account, weight, 1):
            return None
        return found

    def below_share(self, waiting: Iterable[Sequence]) -> list[Account]:
        """The accounts of those sequences for which `most_places` finds a tenant."""
        most: dict[str, float] = {}
        for account in self.by_account:
            has = self.places_by_weight(account, self.weight_of(account), -1)
            most[account[0]] = max(most.get(account[0], 0.0), has)
        return [
            s.account
            for s in waiting
            if most.get(s.lane, 0.0) >= self.places_by_weight(s.account, s.weight, 1)
        ]

    def add(self, sequence: Sequence) -> None:
        self.num_changes += 1
        self.sequences[sequence] = None
        self.by_account.setdefault(sequence.account, {})[sequence] = None
        self.num_in[sequence.lane] += 1

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence, if it runs."""
        if sequence in self.sequences:
            self.num_changes += 1
            del self.sequences[sequence]
            self._leave(sequence)

    def move(self, sequence: Sequence, lane: str) -> None:
        """Puts the sequence, running or not, into another lane; its order among all stays."""
        if sequence not in self.sequences:
            sequence.lane = lane
            return
        self.num_changes += 1
        self._leave(sequence)
        sequence.lane = lane
        self.add(sequence)

    def streams(self, held: Collection[Sequence] = ()) -> Streams:
        """The current streams, without the `held` ones."""
        streams = [s for s in self.sequences if len(s.token_ids) == s.num_computed + 1]
        if held:
            streams = [s for s in streams if s not in held]
        num_kv = sum([s.num_computed for s in streams]) + len(streams)
        num_by_account = {account: len(running) for account, running in self.by_account.items()}
        if len(streams) < len(self.sequences):
            num_by_account = Counter([s.account for s in streams])
        return Streams(streams, num_kv, num_by_account)

    def _leave(self, sequence: Sequence) -> None:
        self.num_in[sequence.lane] -= 1
        running = self.by_account[sequence.account]
        del running[sequence]
        if not running:
            del self.by_account[sequence.account]


UNLIMITED = 2**31


@dataclass(slots=True)
class StepPlan:
    """The chunks of one step, and what is left of its budget."""

    cost: CostModel
    num_tokens_left: int
    num_kept_back: int = 0  # part of the budget reserved for others
    num_prefill_left: int = UNLIMITED  # part of the budget for prompts
    seconds_left: float = math.inf
    limited: Collection[str] = ()  # lanes with less time
    limited_s_left: float = math.inf
    limited_s: float = 0.0  # that they take
    left_out: frozenset[Sequence] = frozenset()  # their streams for which it does not suffice
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)
    displaced: set[Sequence] = field(default_factory=set)  # of these, for sequences admitted now
    is_full: bool = False  # an overdue sequence waits for room: admit no one else
    streams: Streams = field(default_factory=Streams)  # running when the step began
    streams_s: float = 0.0  # time they add to the step, if its time is limited
    has_due_streams: bool = False  # of lanes with a latency target
    _are_streams_first: bool = False  # the first chunks are the streams', one token each
    _stream_costs: tuple[float, float] | None = None  # cost of a token and of a KV token
    num_prefix_queries: int = 0  # tokens of admitted sequences, and how many were cached
    num_prefix_hits: int = 0
    prefixes: list[PrefixFound] = field(default_factory=list)

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

    def num_allowed(self, lane: str, num_pending: int, start: int, *, is_due: bool) -> int:
        """Tokens left in the step for a sequence; one that `is_due` ignores the time limit."""
        num_allowed = min(num_pending, self.num_on_offer)
        if num_pending > 1:
            num_allowed = min(num_allowed, self.num_prefill_left)
        if lane in self.limited:  # one token is more than that time, so that it progresses
            seconds = min(self.limited_s_left, self.seconds_left)
            num_timely = 1 + self.cost.max_tokens(seconds, start) if seconds > 0.0 else 0
            num_allowed = min(num_allowed, num_timely)
        elif self.seconds_left < math.inf and not is_due:
            num_allowed = min(num_allowed, self.cost.max_tokens(self.seconds_left, start))
        return max(0, num_allowed)

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
        is_limited = sequence.lane in self.limited
        if self.seconds_left < math.inf or is_limited:
            features = chunk_features(sequence.num_computed, num_tokens)
            added_s = sign * self.cost.predict_added(features)
            self.seconds_left -= added_s
            self.limited_s_left -= is_limited * added_s
            self.limited_s += is_limited * added_s


# --- once it is computed ----------------------------------------------------------------------


def token_out(
    sequence: Sequence,
    position: int,
    token_id: int,
    finish_reason: FinishReason | None,
    logprob: float = 0.0,
    top_logprobs: tuple[tuple[int, float], ...] = (),
) -> TokenOut:
    """A new token of a sequence, with its log probabilities if its parameters ask for them."""
    scored = sequence.params.logprobs is not None
    return TokenOut(
        sequence.job_id,
        sequence.epoch,
        sequence.choice,
        position,
        token_id,
        finish_reason,
        TokenLogprob(token_id, logprob, top_logprobs) if scored else None,
    )


class StepReport(EngineLoad, array_like=False, tag=False):
    """What a step yields, and its counts; until it is sent, `step_s` is the model's time alone."""

    outputs: list[TokenOut] = msgspec.field(default_factory=list)
    # Complete without an ending token: on arrival, or because a grammar allows no more.
    ended: list[ChoiceEnded] = msgspec.field(default_factory=list)
    failed: list[JobFailed] = msgspec.field(default_factory=list)
    prompt_logprobs: list[PromptLogprobsOut] = msgspec.field(default_factory=list)
    vectors: list[VectorOut] = msgspec.field(default_factory=list)
    marks: list[Marked] = msgspec.field(default_factory=list)
    prefixes: list[PrefixFound] = msgspec.field(default_factory=list)

    def add_scores(self, sequence: Sequence, found: PromptLogprobs) -> None:
        """Adds log probabilities of a part of the sequence's prompt."""
        scores = tuple(TokenLogprob(t.token_id, t.logprob, t.top_logprobs) for t in found.tokens)
        job_id, epoch, number = sequence.job_id, sequence.epoch, sequence.prompt_number
        self.prompt_logprobs.append(PromptLogprobsOut(job_id, epoch, found.start, scores, number))

    def messages(self, start_s: float, ended_s: float) -> list[FromEngine]:
        """Returns marks, found prefixes, prompt scores, tokens, vectors, ends, failures, and the
        load last. The times are those of the whole step."""
        load = EngineLoad(*[getattr(self, name) for name in EngineLoad.__struct_fields__])
        load.model_s, load.step_s, load.ended_s = self.step_s, ended_s - start_s, ended_s
        return [
            *self.marks,
            *self.prefixes,
            *self.prompt_logprobs,
            *self.outputs,
            *self.vectors,
            *self.ended,
            *self.failed,
            load,
        ]


def choice_ended(sequence: Sequence) -> ChoiceEnded:
    """The end of a sequence that no ending token tells of."""
    assert sequence.finish_reason is not None
    return ChoiceEnded(sequence.job_id, sequence.epoch, sequence.choice, sequence.finish_reason)


def prefix_found(sequence: Sequence, num_tokens: int) -> list[PrefixFound]:
    """What a sequence that begins tells of its prompt: the first choice alone, and once."""
    if num_tokens == 0 or sequence.num_preemptions or sequence.choice % sequence.params.n:
        return []
    return [PrefixFound(sequence.job_id, sequence.epoch, sequence.choice, num_tokens)]


def marks_of(plan: StepPlan) -> list[Marked]:
    """Losses of places, then chunks of prompts; a stream's one token is none."""
    marks = [
        Marked(
            sequence.job_id,
            sequence.epoch,
            "displaced" if sequence in plan.displaced else "preempted",
            sequence.num_once_computed,
        )
        for sequence in sorted(plan.preempted, key=lambda sequence: sequence.arrival)
    ]
    for chunk in plan.served_singly:
        sequence = chunk.sequence
        if chunk.num_known > 1 or chunk.start < sequence.num_prompt - 1:
            marks.append(Marked(sequence.job_id, sequence.epoch, "prefill", chunk.num_known))
    return marks
