"""Drafts the next tokens of streams by prompt lookup, where that is expected to save time.

The model computes drafted tokens together with the newest one and draws the next token at each of
them; the engine keeps drawn tokens up to the first that differs from the draft. So each token is
drawn as it would be without drafts, unlike in Leviathan et al. (2023), where drafts are accepted by
chance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from workers.engine.block_manager import BlockManager
from workers.engine.sequence import PromptLookup, Sequence
from workers.engine.step_plan import StepPlan

_MOST_DRAFTED = 8  # for one sequence in one step


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
    """Yields the drafts whose first token saves time. `seconds`: of a step of the streams alone."""
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
        sequence.lookup.read(sequence.token_ids, sequence.num_prompt)
        chance = sequence.lookup.chance
        num_allowed = sequence.max_output - sequence.num_output - 1
        most = min(_MOST_DRAFTED, num_allowed, blocks.num_growable(sequence) - 1)
        if most > 0 and chance * seconds_each > cost_s:
            token_ids = sequence.lookup.draft(sequence.token_ids, most, sequence.ending_ids)
            if sequence.matcher is not None:
                token_ids = token_ids[: sequence.matcher.num_allowed(token_ids)]
            if token_ids:
                yield _Draft(sequence, token_ids, chance, cost_s)
