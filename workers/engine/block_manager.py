"""Allocates KV cache blocks, by counts and ids."""

from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq

from workers.engine.interface import Model
from workers.engine.limits import EngineLimits
from workers.engine.prefix_cache import PrefixCache
from workers.engine.sequence import Sequence


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens; a sequence's blocks are in `block_ids`.

    Several sequences may share a full block, which is then never written. Blank blocks are reused
    last freed first, so that untouched pages stay uncommitted. Freed blocks in the prefix cache
    keep their content until no blank one is left. Then they are reused first freed first, and
    within a sequence from its end, which fewer sequences share.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None = None,
        *,
        can_share: bool = True,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = cache
        self.can_share = can_share
        self._blank_ids = list(range(num_blocks - 1, -1, -1))
        # Free and cached, in the order they were freed.
        self._kept_ids: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self.num_shared = 0  # references to blocks beyond the first of each

    @property
    def num_free(self) -> int:
        return len(self._blank_ids) + len(self._kept_ids)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def blank_ids(self) -> list[int]:
        """Free blocks without cached content."""
        return list(self._blank_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_growable(self, sequence: Sequence) -> int:
        """Tokens that could be computed next for the sequence, in its blocks and free ones."""
        num_slots = (len(sequence.block_ids) + self.num_free) * self.block_size
        return num_slots - sequence.num_computed

    def has_next_slot(self, sequence: Sequence) -> bool:
        """Whether the sequence needs one token and its blocks have room for it."""
        num_computed = sequence.num_computed
        return (
            num_computed + 1 == len(sequence.token_ids)
            and num_computed < len(sequence.block_ids) * self.block_size
        )

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        return num_tokens <= self.num_growable(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Extends `block_ids` to cover the next `num_tokens` tokens to compute."""
        assert self.can_grow(sequence, num_tokens)
        num_needed = self.num_blocks_for(sequence.num_computed + num_tokens)
        while len(sequence.block_ids) < num_needed:
            sequence.block_ids.append(self._take())

    def grow_streams(self, streams: Seq[Sequence]) -> bool:
        """Grows each by one token. If there are too few blocks, grows none and returns False."""
        size = self.block_size
        at_an_end = [s for s in streams if s.num_computed % size == 0]  # of a block, its last maybe
        growing = [s for s in at_an_end if s.num_computed == len(s.block_ids) * size]
        if len(growing) > self.num_free:
            return False
        for sequence in growing:
            sequence.block_ids.append(self._take())
        return True

    def grow_ahead(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds room for one token beyond `num_tokens`, if there is a free block."""
        if num_tokens >= len(sequence.block_ids) * self.block_size and self.num_free > 0:
            sequence.block_ids.append(self._take())

    def shrink(self, sequence: Sequence) -> None:
        """Frees blocks beyond those of its known tokens; nobody shares them."""
        while len(sequence.block_ids) > self.num_blocks_for(sequence.num_known):
            block_id = sequence.block_ids.pop()
            self._num_holders[block_id] = 0
            self._blank_ids.append(block_id)

    def num_held(self, block_ids: Seq[int]) -> int:
        """How many of the blocks are held by some sequence, so that sharing them is free."""
        return sum(self._num_holders[block_id] > 0 for block_id in block_ids)

    def num_private(self, sequence: Sequence) -> int:
        """Blocks that releasing it would free."""
        return sum(self._num_holders[block_id] == 1 for block_id in sequence.block_ids)

    def share(self, sequence: Sequence, block_ids: Seq[int]) -> None:
        """Starts a sequence without blocks on full blocks that are already computed."""
        assert not sequence.block_ids
        for block_id in block_ids:
            self._kept_ids.pop(block_id, None)
            self.num_shared += self._num_holders[block_id] > 0
            self._num_holders[block_id] += 1
        sequence.block_ids.extend(block_ids)
        sequence.num_computed = len(block_ids) * self.block_size

    def can_fork(self, num_tokens: int) -> bool:
        """Whether there is a block to copy when starting with another's first `num_tokens`
        tokens.
        """
        return num_tokens % self.block_size == 0 or self.num_free > 0

    def fork(self, sequence: Sequence, source: Sequence, num_tokens: int) -> int | None:
        """Starts with the first `num_tokens` tokens of `source`, sharing full blocks. Returns the
        block to copy into the sequence's last one before anything is written; None if the tokens
        end with a block."""
        assert num_tokens <= source.num_computed
        assert self.can_fork(num_tokens)
        num_full = num_tokens // self.block_size
        self.share(sequence, source.block_ids[:num_full])
        if num_tokens % self.block_size == 0:
            return None
        sequence.block_ids.append(self._take())
        sequence.num_computed = num_tokens
        return source.block_ids[num_full]

    def release(self, sequence: Sequence) -> None:
        """Frees all blocks of the sequence."""
        if self.cache is not None:
            self.cache.end(sequence)
        for block_id in reversed(sequence.block_ids):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] > 0:
                self.num_shared -= 1
                continue
            if self.cache is not None and self.cache.holds(block_id):
                self._kept_ids[block_id] = None
            else:
                self._blank_ids.append(block_id)
        sequence.block_ids.clear()
        sequence.num_computed = 0

    def evict(self) -> None:
        """Forgets the content of all free blocks."""
        while self._kept_ids:
            self._blank_ids.append(self._forget_oldest())

    def audit(self, owners: Seq[Sequence]) -> None:
        """Asserts that each block is free once or held by `owners` only, and that shared ones are
        full."""
        held = Counter(block_id for owner in owners for block_id in owner.block_ids)
        assert self._num_holders == [held[block_id] for block_id in range(self.num_blocks)]
        assert self.num_shared == held.total() - self.num_used
        assert sorted([*held, *self._blank_ids, *self._kept_ids]) == list(range(self.num_blocks))
        for owner in owners:
            assert owner.num_computed <= len(owner.block_ids) * self.block_size
            writable_ids = owner.block_ids[owner.num_computed // self.block_size :]
            assert all(held[block_id] == 1 for block_id in writable_ids)
        if self.cache is not None:
            self.cache.audit(owners)
            assert all(map(self.cache.holds, self._kept_ids))
            assert not any(map(self.cache.holds, self._blank_ids))

    def _take(self) -> int:
        block_id = self._blank_ids.pop() if self._blank_ids else self._forget_oldest()
        self._num_holders[block_id] = 1
        return block_id

    def _forget_oldest(self) -> int:
        assert self.cache is not None
        block_id, _ = self._kept_ids.popitem(last=False)
        self.cache.drop(block_id)
        return block_id


def blocks_of(model: Model, limits: EngineLimits, revision: str) -> BlockManager:
    """Returns all blocks of a model, shared as far as model and limits allow."""
    caches = limits.prefix_caching and model.shares_blocks
    cache = PrefixCache(model.block_size, revision) if caches else None
    return BlockManager(model.num_blocks, model.block_size, cache, can_share=model.shares_blocks)
