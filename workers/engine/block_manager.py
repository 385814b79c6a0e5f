"""Allocates KV cache blocks, by counts and ids, and finds the blocks of token prefixes."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq

from workers.engine.interface import Chunk, EngineLimits, Model
from workers.engine.retention import Retention
from workers.engine.sequence import Sequence
from workers.engine.states import StateSlots

_KEY_BYTES = 16


class PrefixCache:
    """Full blocks by the hash of all tokens up to their end: key_i = H(key_{i-1}, tokens).

    The chain starts with model revision and tenant, so tenants never share, and none can probe
    another's prompts by timing (CVE-2025-46570).
    """

    def __init__(self, block_size: int, revision: str = "") -> None:
        self._block_size = block_size
        self._revision = revision
        self.block_ids: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}
        self._computing: dict[bytes, Sequence] = {}

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix, never including its last token."""
        self.extend_keys(sequence, (sequence.num_known - 1) // self._block_size)
        found: list[int] = []
        for key in sequence.block_keys:
            block_id = self.block_ids.get(key)
            if block_id is None or (len(found) + 1) * self._block_size >= sequence.num_known:
                break
            found.append(block_id)
        return found

    def put(self, sequence: Sequence) -> None:
        """Adds the sequence's full blocks; equal blocks are stored once."""
        num_full = sequence.num_computed // self._block_size
        self.extend_keys(sequence, num_full)
        for index in range(sequence.num_keyed, num_full):
            key, block_id = sequence.block_keys[index], sequence.block_ids[index]
            if key not in self.block_ids and block_id not in self.keys:
                self.block_ids[key] = block_id
                self.keys[block_id] = key
            self._forget_computing(key, sequence)
        sequence.num_keyed = max(sequence.num_keyed, num_full)

    def drop(self, block_id: int) -> None:
        """Forgets a block that will be overwritten."""
        del self.block_ids[self.keys.pop(block_id)]

    def begin(self, sequence: Sequence) -> None:
        """Records that the sequence runs: it will compute its known blocks that are not cached."""
        for key in sequence.block_keys[sequence.num_keyed :]:
            self._computing.setdefault(key, sequence)

    def end(self, sequence: Sequence) -> None:
        """Records that the sequence lost its blocks and computes nothing."""
        for key in sequence.block_keys[sequence.num_keyed :]:
            self._forget_computing(key, sequence)
        sequence.num_keyed = 0

    def computes_next(self, sequence: Sequence, num_found: int) -> Sequence | None:
        """The sequence that computes the block after the `num_found` cached ones, if needed."""
        if (num_found + 1) * self._block_size >= sequence.num_known:
            return None
        return self._computing.get(sequence.block_keys[num_found])

    def audit(self, owners: Seq[Sequence]) -> None:
        """Asserts that keys and blocks agree, and that only `owners` compute."""
        assert {key: block_id for block_id, key in self.keys.items()} == self.block_ids
        assert set(self._computing.values()) <= set(owners)

    def _forget_computing(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
        """Computes the keys of its first `num_blocks` blocks, whose tokens are known."""
        keys = sequence.block_keys
        while len(keys) < num_blocks:
            start = len(keys) * self._block_size
            token_ids = array("q", sequence.token_ids[start : start + self._block_size])
            previous = keys[-1] if keys else self._seed(sequence.tenant)
            keys.append(_hash(previous + token_ids.tobytes()))

    def _seed(self, tenant: str) -> bytes:
        # Hash each alone, so that different pairs never collide by concatenation.
        return _hash(_hash(self._revision.encode()) + _hash(tenant.encode()))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens; a sequence's blocks are in `block_ids`.

    Several sequences may share a full block, which is then never written. Blank blocks are reused
    last freed first, so that untouched pages stay uncommitted. Freed blocks in the prefix cache
    keep their content until no blank one is left. Then they are reused first freed first, and
    within a sequence from its end, which fewer sequences share; the retained ones last.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None = None,
        *,
        can_share: bool = True,
        states: StateSlots | None = None,
    ) -> None:
        """`can_share`: whether a block can be copied, and its last tokens taken back; not with
        states, which cover all tokens up to one position."""
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = cache
        self.can_share = can_share and states is None
        self.states = states
        self._blank_ids = list(range(num_blocks - 1, -1, -1))
        # Free and cached, in the order they were freed.
        self._kept_ids: OrderedDict[int, None] = OrderedDict()
        self.retained_ids: OrderedDict[int, None] = OrderedDict()
        self.retention = Retention(num_blocks)
        self._num_holders = [0] * num_blocks
        self.num_shared = 0  # references to blocks beyond the first of each

    @property
    def num_free(self) -> int:
        return len(self._blank_ids) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is kept for others until they are needed."""
        return len(self._kept_ids) + len(self.retained_ids)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def blank_ids(self) -> list[int]:
        """Free blocks without cached content."""
        return list(self._blank_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
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

    def find(self, sequence: Sequence) -> list[int]:
        """The cached blocks of its prefix that it can start on."""
        found = [] if self.cache is None else self.cache.find(sequence)
        if self.states is None:
            return found
        return found[: self.states.num_usable(sequence, len(found))]

    def share(self, sequence: Sequence, block_ids: Seq[int]) -> None:
        """Starts a sequence without blocks on full blocks that are already computed."""
        assert not sequence.block_ids
        if self.states is not None:
            num_cached = len(self.cache.find(sequence)) if self.cache is not None else 0
            self.states.start(sequence, len(block_ids), num_cached)
        for block_id in block_ids:
            self._kept_ids.pop(block_id, None)
            self.retained_ids.pop(block_id, None)
            self.num_shared += self._num_holders[block_id] > 0
            self._num_holders[block_id] += 1
        sequence.block_ids.extend(block_ids)
        sequence.num_computed = len(block_ids) * self.block_size
        self.sort(self.retention.end(sequence))

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

    def plan_saves(self, chunks: Collection[Chunk]) -> None:
        """Chooses which states a step keeps for the prefixes that it computes."""
        if self.states is None or self.cache is None:
            return
        for chunk in chunks:
            num_full = (chunk.start + chunk.num_tokens) // self.block_size
            self.cache.extend_keys(chunk.sequence, num_full)
        self.states.plan_saves(chunks)

    def release(self, sequence: Sequence) -> None:
        if self.states is not None:
            self.states.end(sequence)
        if self.cache is not None:
            self.cache.end(sequence)
        for block_id in reversed(sequence.block_ids):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] > 0:
                self.num_shared -= 1
                continue
            if self.cache is not None and (key := self.cache.keys.get(block_id)):
                self._free_ids(key)[block_id] = None
            else:
                self._blank_ids.append(block_id)
        sequence.block_ids.clear()
        sequence.num_computed = 0

    def sort(self, keys: Seq[bytes]) -> None:
        """Retains the free blocks of these keys, or lets them go, as `retention` says now."""
        for key in reversed(keys):
            block_id = self.cache.block_ids.get(key) if self.cache is not None else None
            if block_id is not None and not self._num_holders[block_id]:
                self._kept_ids.pop(block_id, None)
                self.retained_ids.pop(block_id, None)
                self._free_ids(key)[block_id] = None

    def evict(self) -> None:
        """Forgets the content of all free blocks."""
        while self.num_cached:
            self._blank_ids.append(self._forget_oldest())

    def audit(self, owners: Seq[Sequence]) -> None:
        """Asserts that each block is free once or held by `owners` only, and that shared ones are
        full."""
        held = Counter(block_id for owner in owners for block_id in owner.block_ids)
        assert self._num_holders == [held[block_id] for block_id in range(self.num_blocks)]
        assert self.num_shared == held.total() - self.num_used
        free = [*self._blank_ids, *self._kept_ids, *self.retained_ids]
        assert sorted([*held, *free]) == list(range(self.num_blocks))
        for owner in owners:
            assert owner.num_computed <= len(owner.block_ids) * self.block_size
            writable_ids = owner.block_ids[owner.num_computed // self.block_size :]
            assert all(held[block_id] == 1 for block_id in writable_ids)
        if self.states is not None:
            self.states.audit(owners)
        if self.cache is not None:
            self.cache.audit(owners)
            retained = {i for i, key in self.cache.keys.items() if key in self.retention.keys}
            assert self.retained_ids.keys() == retained - held.keys()
            assert self._kept_ids.keys() == self.cache.keys.keys() - held.keys() - retained

    def _take(self) -> int:
        block_id = self._blank_ids.pop() if self._blank_ids else self._forget_oldest()
        self._num_holders[block_id] = 1
        return block_id

    def _forget_oldest(self) -> int:
        assert self.cache is not None
        block_id, _ = (self._kept_ids or self.retained_ids).popitem(last=False)
        self.cache.drop(block_id)
        return block_id

    def _free_ids(self, key: bytes) -> OrderedDict[int, None]:
        return self.retained_ids if key in self.retention.keys else self._kept_ids


def blocks_of(model: Model, limits: EngineLimits, revision: str) -> BlockManager:
    """Returns all blocks of a model, shared as far as model and limits allow."""
    size, states = model.block_size, None
    caches = limits.prefix_caching and model.shares_blocks
    if model.num_state_slots:
        states = StateSlots(model.num_state_slots, limits.max_num_seqs, size)
    cache = PrefixCache(size, revision) if caches else None
    return BlockManager(model.num_blocks, size, cache, can_share=model.shares_blocks, states=states)
