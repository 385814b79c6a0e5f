"""Hands out KV cache blocks. Knows counts and ids, never tensors."""

from workers.engine.sequence import Sequence


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens; a sequence's blocks lie in `block_ids`.

    The block freed last is handed out first: what was in use before is in use again, so that
    an arena whose pages the OS commits on touch grows only as far as the load does.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free_ids = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_growable(self, sequence: Sequence) -> int:
        """Tokens that could be computed next for the sequence: room in its blocks and free ones."""
        num_slots = (len(sequence.block_ids) + self.num_free) * self.block_size
        return num_slots - sequence.num_computed

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        return num_tokens <= self.num_growable(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Extends `block_ids` to cover the next `num_tokens` tokens to compute."""
        assert self.can_grow(sequence, num_tokens)
        num_needed = self.num_blocks_for(sequence.num_computed + num_tokens)
        while len(sequence.block_ids) < num_needed:
            sequence.block_ids.append(self._free_ids.pop())

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks back; nothing of the sequence is computed any more."""
        self._free_ids.extend(reversed(sequence.block_ids))
        sequence.block_ids.clear()
        sequence.num_computed = 0

    def audit(self, owners: list[Sequence]) -> None:
        """Asserts that each block is free or owned exactly once, by one of `owners`."""
        owned_ids = [block_id for owner in owners for block_id in owner.block_ids]
        assert sorted(owned_ids + self._free_ids) == list(range(self.num_blocks))
