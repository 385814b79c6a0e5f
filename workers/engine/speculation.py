"""Drafts the next tokens of streams by prompt lookup, as far as that is expected to pay.

A draft is what followed when the sequence last had its three newest tokens (Saxena, "Prompt Lookup
Decoding", 2023). The model computes drafted tokens together with the newest one and draws the next
token at each of them; the engine keeps drawn tokens up to the first that differs from the draft.
So each token is drawn as it would be without drafts, unlike in Leviathan et al. (2023), where
drafts are accepted by chance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from workers.engine.block_manager import BlockManager
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepPlan

_NUM_MATCHED = 3
_MOST_DRAFTED = 8  # for one sequence in one step
_REMEMBERED = 0.9  # of an earlier answer's weight: it is the last ten that count


class PromptLookup:
    """One sequence's tokens by the three before them, and how often these foretold the next."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # by hash: a collision costs a wrong draft
        self._num_read = _NUM_MATCHED
        self._num_right = 0.0
        self._num_tried = 1.0  # so that the first draft waits for an answer

    @property
    def chance(self) -> float:
        """The share of its last output tokens that drafts would have foretold, drafted or not."""
        return self._num_right / self._num_tried

    def read(self, sequence: Sequence) -> None:
        """Reads the tokens since the last call. All calls are for the same sequence."""
        token_ids = sequence.token_ids
        for position in range(self._num_read, len(token_ids)):
            key = hash(tuple(token_ids[position - _NUM_MATCHED : position]))
            found = self._next.get(key)
            if found is not None and position >= sequence.num_prompt:
                is_right = token_ids[found] == token_ids[position]
                self._num_right = _REMEMBERED * self._num_right + is_right
                self._num_tried = _REMEMBERED * self._num_tried + 1.0
            self._next[key] = position
        self._num_read = max(self._num_read, len(token_ids))

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may come next. They never end the sequence, and its grammar
        allows them."""
        token_ids = sequence.token_ids
        found = self._next.get(hash(tuple(token_ids[-_NUM_MATCHED:])))
        drafted: list[int] = []
        if found is None:
            return drafted
        for position in range(found, found + most):
            # Behind the known tokens the draft repeats itself.
            behind = position - len(token_ids)
            token_id = token_ids[position] if behind < 0 else drafted[behind]
            if token_id in sequence.ending_ids:
                break
            drafted.append(token_id)
        if sequence.matcher is not None:
            return drafted[: sequence.matcher.num_allowed(drafted)]
        return drafted


@dataclass(slots=True)
class _Draft:
    """A sequence's draft, and how much of it the step computes."""

    sequence: Sequence
    token_ids: list[int]
    chance: float  # that a token is right if those before it are
    cost_s: float  # of a token
    num_taken: int = 0

    @property
    def next_chance(self) -> float:
        """The chance that all tokens up to the next one are right."""
        return self.chance ** (self.num_taken + 1)


def add_drafts(plan: StepPlan, blocks: BlockManager) -> None:
    """Adds drafts to a planned step, from tokens, time and blocks that nothing else uses.

    A token is added if it is expected to lower the time per output token: a step of the streams
    alone takes `seconds` and yields one token for each; a drafted token costs `cost_s` and yields
    one with its chance. The likeliest are added first.
    """
    seconds = plan.cost.predict(plan.streams.features)
    num_expected = float(len(plan.streams.sequences))
    num_left, seconds_left = plan.num_tokens_left, plan.seconds_left
    drafts = list(_drafts(plan, blocks, seconds))
    heap = [(-draft.next_chance, number) for number, draft in enumerate(drafts)]
    heapify(heap)
    while heap and num_left > 0:
        chance, number = -heap[0][0], heappop(heap)[1]
        draft = drafts[number]
        if chance * seconds <= draft.cost_s * num_expected or draft.cost_s > seconds_left:
            continue
        draft.num_taken += 1
        seconds += draft.cost_s
        num_expected += chance
        num_left -= 1
        seconds_left -= draft.cost_s
        if draft.num_taken < len(draft.token_ids):
            heappush(heap, (-draft.next_chance, number))
    taken: dict[Sequence, list[int]] = {}
    for draft in drafts:
        # Other drafts may have taken the blocks.
        num_room = blocks.num_growable(draft.sequence) - 1
        if token_ids := draft.token_ids[: min(draft.num_taken, num_room)]:
            blocks.grow(draft.sequence, 1 + len(token_ids))
            taken[draft.sequence] = token_ids
    plan.put_drafts(taken)


def _drafts(plan: StepPlan, blocks: BlockManager, seconds: float) -> Iterator[_Draft]:
    """The drafts whose first token pays. `seconds`: of a step of the streams alone."""
    _, b, c, d = plan.cost.coefficients
    num_streams = max(1, len(plan.streams.sequences))
    seconds_each = seconds / num_streams
    for sequence in plan.streams.sequences:
        # Most tokens that the cost model saw are of prompts, for which nothing is drawn. What a
        # stream takes beside others is learned as reading KV, so a draft is charged for that too.
        num_kv = 1 + sequence.num_computed * (1 - 1 / num_streams)
        cost_s = b + c * num_kv + d * sequence.num_computed
        if cost_s >= seconds_each or sequence not in plan.chunks:
            continue
        if sequence.matcher is not None and sequence.matcher.mask is not None:
            continue  # that mask is of its next token alone
        if sequence.lookup is None:
            sequence.lookup = PromptLookup()
        sequence.lookup.read(sequence)
        chance = sequence.lookup.chance
        num_allowed = sequence.max_output - sequence.num_output - 1
        most = min(_MOST_DRAFTED, num_allowed, blocks.num_growable(sequence) - 1)
        if most > 0 and chance * seconds_each > cost_s:
            token_ids = sequence.lookup.draft(sequence, most)
            if token_ids:
                yield _Draft(sequence, token_ids, chance, cost_s)
