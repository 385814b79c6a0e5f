"""Maps token prefixes to blocks, and tracks which sequences are computing them."""

import hashlib
from array import array
from collections.abc import Sequence as Seq

from workers.engine.sequence import Sequence

_KEY_BYTES = 16


class PrefixCache:
    """Full blocks by the hash of all tokens up to their end: key_i = H(key_{i-1}, tokens).

    The chain starts with model revision and tenant, so tenants never share, and none can probe
    another's prompts by timing (CVE-2025-46570).
    """

    def __init__(self, block_size: int, revision: str = "") -> None:
        self._block_size = block_size
        self._revision = revision
        self._block_ids: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._computing: dict[bytes, Sequence] = {}

    def holds(self, block_id: int) -> bool:
        return block_id in self._keys

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix, never including its last token."""
        self._extend_keys(sequence, (sequence.num_known - 1) // self._block_size)
        found: list[int] = []
        for key in sequence.block_keys:
            block_id = self._block_ids.get(key)
            if block_id is None or (len(found) + 1) * self._block_size >= sequence.num_known:
                break
            found.append(block_id)
        return found

    def put(self, sequence: Sequence) -> None:
        """Adds the sequence's full blocks; equal blocks are stored once."""
        num_full = sequence.num_computed // self._block_size
        self._extend_keys(sequence, num_full)
        for index in range(sequence.num_keyed, num_full):
            key, block_id = sequence.block_keys[index], sequence.block_ids[index]
            if key not in self._block_ids and block_id not in self._keys:
                self._block_ids[key] = block_id
                self._keys[block_id] = key
            self._forget_computing(key, sequence)
        sequence.num_keyed = max(sequence.num_keyed, num_full)

    def drop(self, block_id: int) -> None:
        """Forgets a block that will be overwritten."""
        del self._block_ids[self._keys.pop(block_id)]

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
        assert {key: block_id for block_id, key in self._keys.items()} == self._block_ids
        assert set(self._computing.values()) <= set(owners)

    def _forget_computing(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def _extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
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
