"""A cache bounded in bytes. Knows values only by the sizes that its users state."""

import hashlib
from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")

_ENTRY_BYTES = 1024  # of an entry beside its value, at most


class _Kept(NamedTuple, Generic[V]):
    value: V
    owner: str
    num_bytes: int


class ByteCache(Generic[V]):
    """The values that were used last, by digests of their keys, which may be as long as values.
    The values of one owner take at most half of the bytes, so that others keep theirs."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # What was used last is last, also among an owner's: the sum of its bytes, and their keys.
        self._kept: OrderedDict[bytes, _Kept[V]] = OrderedDict()
        self._of: dict[str, tuple[int, OrderedDict[bytes, None]]] = {}
        self.num_bytes = 0

    def get(self, key: str | bytes) -> V | None:
        digest = _digest(key)
        if (found := self._kept.get(digest)) is None:
            return None
        self._kept.move_to_end(digest)
        self._of[found.owner][1].move_to_end(digest)
        return found.value

    def keep(self, key: str | bytes, value: V, num_bytes: int, owner: str = "") -> None:
        """Keeps a value, unless it takes more than half of the bytes. Its owner's oldest ones make
        room for it before those of others do."""
        digest, num_bytes, most = _digest(key), num_bytes + _ENTRY_BYTES, self._max_bytes // 2
        self._drop(digest)
        if num_bytes > most:
            return
        while (own := self._of.get(owner)) is not None and own[0] + num_bytes > most:
            self._drop(next(iter(own[1])))
        while self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
        own_bytes, digests = self._of.get(owner) or (0, OrderedDict[bytes, None]())
        digests[digest] = None
        self._of[owner] = own_bytes + num_bytes, digests
        self._kept[digest] = _Kept(value, owner, num_bytes)
        self.num_bytes += num_bytes

    def drop(self, key: str | bytes) -> None:
        self._drop(_digest(key))

    def _drop(self, digest: bytes) -> None:
        if (found := self._kept.pop(digest, None)) is None:
            return
        self.num_bytes -= found.num_bytes
        own_bytes, digests = self._of.pop(found.owner)
        del digests[digest]
        if digests:
            self._of[found.owner] = own_bytes - found.num_bytes, digests


def _digest(key: str | bytes) -> bytes:
    raw = key.encode(errors="surrogatepass") if isinstance(key, str) else key
    return hashlib.sha256(raw).digest()
