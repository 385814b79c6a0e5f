"""Hands out a step's tokens under one budget, and blocks with them.

Knows no phases: a sequence has pending tokens, one or many, and gets as many as fit. Leaves
running to the model, endings to the engine, order to the policy, admission to the strategy.
"""

from dataclasses import dataclass, field

from workers.engine.block_manager import BlockManager
from workers.engine.limits import EngineLimits
from workers.engine.model import Chunk
from workers.engine.policies import Policy
from workers.engine.sequence import Sequence
from workers.engine.strategy import Door


@dataclass(slots=True)
class StepPlan:
    """The chunks of one step, and what is left of its budget."""

    num_tokens_left: int
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    num_preemptions: int = 0

    def put(self, chunk: Chunk) -> None:
        self.chunks[chunk.sequence] = chunk
        self.num_tokens_left -= chunk.num_tokens

    def take_back(self, sequence: Sequence) -> None:
        if sequence in self.chunks:
            self.num_tokens_left += self.chunks.pop(sequence).num_tokens


class Scheduler:
    """Running sequences hold blocks; waiting ones hold none.

    Progress is certain as long as each sequence fits into the blocks alone (the engine refuses
    the others): the running sequence with the smallest key is never preempted, and can preempt
    all others. What is preempted comes back only under the high-water mark, which it cannot
    meet in the same step, so two sequences never take each other's blocks in turns.
    """

    def __init__(
        self, blocks: BlockManager, limits: EngineLimits, door: Door, policy: Policy
    ) -> None:
        self.blocks = blocks
        self.limits = limits
        self._door = door
        self._policy = policy
        # Sets in order of insertion: removal is constant-time, iteration deterministic.
        self._running: dict[Sequence, None] = {}
        self._waiting: dict[Sequence, None] = {}

    @property
    def running(self) -> list[Sequence]:
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended or was stopped, and takes its blocks."""
        self.blocks.release(sequence)
        self._running.pop(sequence, None)
        self._waiting.pop(sequence, None)

    def plan(self, now_s: float, num_reserved: int = 0) -> StepPlan:
        """The next step: running sequences first, then waiting ones, each with what fits.

        Among the running, those that need one token go first, so that a long prompt never
        delays a stream; within that, and among the waiting, the policy's key decides.
        `num_reserved` tokens of the budget are spoken for.
        """
        plan = StepPlan(self.limits.max_num_batched_tokens - num_reserved)
        for sequence in sorted(
            self._running, key=lambda s: (s.num_pending > 1, self._policy.key(s, now_s))
        ):
            if plan.num_tokens_left == 0:
                break
            if sequence in self._running:
                self._hand_out(plan, sequence, now_s)
        self._admit(plan, now_s)
        return plan

    def _hand_out(self, plan: StepPlan, sequence: Sequence, now_s: float) -> None:
        """Gives a running sequence what it needs, up to the budget and the free blocks.

        Without room for one token, worse keys lose their blocks to it; where there is none
        worse, it waits with its blocks and with what it has computed.
        """
        while not self.blocks.can_grow(sequence, 1):
            victims = self._worse_block_owners(sequence, now_s)
            if not victims:
                return
            self._preempt(plan, max(victims, key=lambda s: self._policy.key(s, now_s)))
        num_tokens = min(
            sequence.num_pending, plan.num_tokens_left, self.blocks.num_growable(sequence)
        )
        if num_tokens == 0:
            return
        self.blocks.grow(sequence, num_tokens)
        samples = num_tokens == sequence.num_pending
        plan.put(Chunk(sequence, sequence.num_computed, num_tokens, samples))

    def _worse_block_owners(self, sequence: Sequence, now_s: float) -> list[Sequence]:
        own_key = self._policy.key(sequence, now_s)
        return [s for s in self._running if s.block_ids and self._policy.key(s, now_s) > own_key]

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """Blocks and computed tokens go; known tokens and the place in the order stay."""
        plan.take_back(victim)
        plan.num_preemptions += 1
        victim.num_preemptions += 1
        self.blocks.release(victim)
        del self._running[victim]
        self._waiting[victim] = None

    def _admit(self, plan: StepPlan, now_s: float) -> None:
        """Admits whom the strategies have let in, in the policy's order, while there is room.

        No one passes a sequence that does not fit: otherwise a large one could wait for ever.
        """
        if not self._waiting or self.num_running >= self.limits.max_num_seqs:
            return
        num_committed = sum(self._num_blocks_known(s) for s in self._running)
        let_in = filter(self._door.is_open, self._waiting)
        for candidate in sorted(let_in, key=lambda s: self._policy.key(s, now_s)):
            num_committed += self._num_blocks_known(candidate)
            if plan.num_tokens_left == 0 or not self._has_room(num_committed):
                return
            del self._waiting[candidate]
            self._running[candidate] = None
            self._hand_out(plan, candidate, now_s)

    def _num_blocks_known(self, sequence: Sequence) -> int:
        """Blocks that the known tokens will fill, those that are still to be computed included."""
        return self.blocks.num_blocks_for(sequence.num_known)

    def _has_room(self, num_committed_blocks: int) -> bool:
        """Whether one more may run when that fills so many blocks; the first always may."""
        if not self._running:
            return True
        num_allowed = int(self.limits.kv_high_water * self.blocks.num_blocks)
        return self.num_running < self.limits.max_num_seqs and num_committed_blocks <= num_allowed
