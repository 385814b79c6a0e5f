"""API keys, looked up in Redis and cached for a moment.

Every gateway refuses a revoked key within REMEMBERED_S.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from cachetools import TTLCache

from contract.api_keys import ApiKey, ApiKeys, KeyTerms, is_same_key, prefix_of

log = logging.getLogger("batchway.gateway")

REMEMBERED_S = 2.0  # seconds; revocation is promised within 5
MAX_REMEMBERED = 10_000  # cached prefixes; guesses must not fill the memory

T = TypeVar("T")


class Guard(Protocol):
    """Runs a call to Redis."""

    async def __call__(self, function: Callable[[], Awaitable[T]], /) -> T: ...


class KeyRing:
    """The API keys that one gateway knows. Each method raises BrokerUnavailable, WireError."""

    def __init__(
        self,
        api_keys: ApiKeys,
        guard: Guard,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api_keys = api_keys
        self._guard = guard
        self._clock_s = clock_s
        # Prefix -> the record, and its expiry by `clock_s`.
        self._found: TTLCache[str, tuple[ApiKey | None, float]] = TTLCache(
            MAX_REMEMBERED, REMEMBERED_S, timer=clock_s
        )
        self._none_until_s = float("-inf")
        self._has_some = False

    async def terms_of(self, key: str) -> KeyTerms | None:
        """The terms of a key; None if it is wrong, expired or revoked."""
        prefix = prefix_of(key)
        pepper = await self._guard(self._api_keys.pepper)
        if prefix is None or pepper is None:
            return None
        record, expires_s = await self._find(prefix)
        if not is_same_key(key, record, pepper):
            if record is not None and record.pepper_id != pepper.id:
                log.warning("the API key %s was made under another pepper", prefix)
            return None
        assert record is not None
        is_active = record.state == "active" and self._clock_s() < expires_s
        return record.terms if is_active else None

    async def has_some(self) -> bool:
        """Whether any key was ever created. False may be REMEMBERED_S old."""
        if not self._has_some and self._clock_s() >= self._none_until_s:
            self._has_some = await self._guard(self._api_keys.exist)
            self._none_until_s = self._clock_s() + REMEMBERED_S
        return self._has_some

    async def _find(self, prefix: str) -> tuple[ApiKey | None, float]:
        if (known := self._found.get(prefix)) is None:
            asked_s = self._clock_s()
            record = await self._guard(lambda: self._api_keys.find(prefix))
            known = record, asked_s + (record.expires_in_s if record else 0.0)
            self._found[prefix] = known
        return known
