"""Accounts for what a step has computed: in sequences, tenants, lanes and the prefix cache."""

from collections.abc import Sequence as Seq

from workers.engine.block_manager import BlockManager
from workers.engine.interface import Chunk
from workers.engine.lanes import Lanes
from workers.engine.policies import Policy
from workers.engine.running import Streams
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepPlan


class Books:
    """Called once for each step, after the model has computed it."""

    def __init__(self, lanes: Lanes, policy: Policy, blocks: BlockManager) -> None:
        self._lanes = lanes
        self._policy = policy
        self._cache = blocks.cache
        self._block_size = blocks.block_size

    def settle(self, plan: StepPlan) -> int:
        """Returns how many of the step's tokens had been computed before."""
        streams, others = plan.served_together, plan.served_singly
        self._lanes.settle(others, streams.num_by_account)
        self._book_streams(streams)
        return sum([self._book(chunk) for chunk in others])

    def account(self, chunks: Seq[Chunk]) -> int:
        """Does `settle` for chunks without a plan."""
        self._lanes.settle(chunks)
        return sum([self._book(chunk) for chunk in chunks])

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Accounts for drafted tokens that were right, as if more steps had computed them."""
        end = sequence.num_computed + num_tokens
        sequence.num_computed = end
        sequence.num_once_computed = max(sequence.num_once_computed, end)
        self._lanes.settle((), {sequence.account: num_tokens})
        self._policy.charge(sequence.account, 0, num_tokens)
        if self._cache is not None and end >= (sequence.num_keyed + 1) * self._block_size:
            self._cache.put(sequence)

    def _book_streams(self, streams: Streams) -> None:
        """Accounts for streams: one token each, never computed before."""
        for account, num in streams.num_by_account.items():
            self._policy.charge(account, 0, num)
        block_size = self._block_size
        for sequence in streams.sequences:
            end = sequence.num_computed + 1
            sequence.num_computed = sequence.num_once_computed = end
            if end == sequence.num_prompt:  # for example, if all tokens before it were cached
                self._policy.charge(sequence.account, 1, 0)
            if end % block_size == 0 and self._cache is not None:
                self._cache.put(sequence)

    def _book(self, chunk: Chunk) -> int:
        """Returns how much of the chunk had been computed before."""
        sequence, start = chunk.sequence, chunk.start
        end, num_before = start + chunk.num_known, sequence.num_once_computed
        sequence.num_computed = end
        if end > num_before:
            # More than the prompt of a resumed job may have been cached.
            num_in = max(0, min(end, sequence.num_prompt) - max(start, num_before))
            sequence.num_once_computed = end
            self._policy.charge(sequence.account, num_in, int(chunk.samples))
        if self._cache is not None and end >= (sequence.num_keyed + 1) * self._block_size:
            self._cache.put(sequence)
        return max(0, min(end, num_before) - start)
