"""A cache bounded in bytes. Knows values only by the sizes that its users state."""

import hashlib
from typing import Generic, TypeVar

from cachetools import LRUCache

V = TypeVar("V")

_ENTRY_BYTES = 1024  # of an entry beside its value, at most


class ByteCache(Generic[V]):
    """The values that were used last, by digests of their keys, which may be as long as values.
    The values of one owner take at most half of the bytes, so that others keep theirs."""

    def __init__(self, max_bytes: int) -> None:
        # Value, owner, bytes.
        self._kept: LRUCache[bytes, tuple[V, str, int]] = LRUCache(max_bytes, lambda kept: kept[2])

    @property
    def num_bytes(self) -> int:
        return int(self._kept.currsize)

    def get(self, key: str | bytes) -> V | None:
        found = self._kept.get(_digest(key))
        return None if found is None else found[0]

    def keep(self, key: str | bytes, value: V, num_bytes: int, owner: str = "") -> None:
        """Keeps a value, unless it takes more than half of the bytes. Its owner's oldest ones make
        room for it before those of others do."""
        digest, num_bytes = _digest(key), num_bytes + _ENTRY_BYTES
        self._kept.pop(digest, None)
        own = [(each, kept[2]) for each, kept in self._kept.items() if kept[1] == owner]
        left = self._kept.maxsize // 2 - num_bytes - sum(size for _, size in own)
        for oldest, size in own:
            if left >= 0:
                break
            del self._kept[oldest]
            left += size
        if left >= 0:
            self._kept[digest] = value, owner, num_bytes

    def drop(self, key: str | bytes) -> None:
        self._kept.pop(_digest(key), None)


def _digest(key: str | bytes) -> bytes:
    raw = key.encode(errors="surrogatepass") if isinstance(key, str) else key
    return hashlib.sha256(raw).digest()
