"""API keys, looked up in Redis and cached for a moment; and the sessions of browsers.

Every gateway refuses a revoked key within REMEMBERED_S.

A session stands for a key until its end. No gateway keeps it: it names the key and its end, under
a signature that needs the key's digest and the pepper, so it ends with its key.
"""

import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from cachetools import TTLCache

from contract.api_keys import ApiKey, ApiKeys, KeyTerms, Scope, is_same_key, prefix_of

log = logging.getLogger("batchway.gateway")

REMEMBERED_S = 2.0  # seconds; revocation is promised within 5
MAX_REMEMBERED = 10_000  # cached prefixes; guesses must not fill the memory
SESSION_S = 3600.0
DEFAULT_TENANT = "default"
EVERYTHING = KeyTerms(tenant=DEFAULT_TENANT, scopes=(Scope.ADMIN,))
_OWN = "operator"  # in place of a prefix; no prefix has an `o`
_SESSION = re.compile(r"bws-([a-z0-9]{8})-([0-9]{10,12})-([0-9a-f]{64})")

T = TypeVar("T")


class RedisGuard(Protocol):
    """Runs a call to Redis."""

    async def __call__(self, function: Callable[[], Awaitable[T]], /) -> T: ...


class KeyRing:
    """The API keys that one gateway knows. Each method raises BrokerUnavailable, WireError."""

    def __init__(
        self,
        api_keys: ApiKeys,
        guard: RedisGuard,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        own_key: str | None = None,
        wants_key: bool = False,
    ) -> None:
        """`own_key`: the gateway's, which permits everything. `wants_key`: also where there is
        none."""
        self._api_keys = api_keys
        self._own_key = own_key
        self._guard = guard
        self._clock_s = clock_s
        # Prefix -> the record, and its expiry by `clock_s`.
        self._found: TTLCache[str, tuple[ApiKey | None, float]] = TTLCache(
            MAX_REMEMBERED, REMEMBERED_S, timer=clock_s
        )
        self._none_until_s = float("-inf")
        self._has_some = wants_key

    async def terms_of(self, key: str) -> KeyTerms | None:
        """The terms of a key or a session; None if it is wrong, expired or revoked."""
        if (found := _SESSION.fullmatch(key)) is not None:
            return await self._terms_of_session(found[1], int(found[2]), found[3])
        if self._own_key is not None and hmac.compare_digest(key.encode(), self._own_key.encode()):
            return EVERYTHING
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

    async def begin_session(self, key: str) -> str | None:
        """A session of SESSION_S; None if the key is not valid."""
        if await self.terms_of(key) is None:
            return None
        prefix, end_s = prefix_of(key) or _OWN, int(time.time() + SESSION_S)
        signer = await self._signer(prefix)
        return None if signer is None else f"bws-{prefix}-{end_s}-{_signature(signer, end_s)}"

    async def _terms_of_session(self, prefix: str, end_s: int, signature: str) -> KeyTerms | None:
        signer = await self._signer(prefix)
        if signer is None or time.time() >= end_s:
            return None
        return signer[1] if hmac.compare_digest(signature, _signature(signer, end_s)) else None

    async def _signer(self, prefix: str) -> tuple[bytes, KeyTerms] | None:
        """The secret that signs the sessions of an active key, and its terms."""
        if prefix == _OWN and self._own_key is not None:
            return self._own_key.encode(), EVERYTHING
        record, expires_s = await self._find(prefix)
        pepper = await self._guard(self._api_keys.pepper)
        if record is None or pepper is None or record.pepper_id != pepper.id:
            return None
        is_active = record.state == "active" and self._clock_s() < expires_s
        return (pepper.secret + record.digest.encode(), record.terms) if is_active else None

    async def wants_key(self) -> bool:
        """Whether callers need a key: by the settings, or as one was ever created. False may be
        REMEMBERED_S old."""
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


def name_of(key: str) -> str:
    """What tells keys apart without revealing them, of a valid key or session."""
    session = _SESSION.fullmatch(key)
    return session[1] if session is not None else prefix_of(key) or _OWN


def _signature(signer: tuple[bytes, KeyTerms], end_s: int) -> str:
    return hmac.digest(signer[0], f"batchway session {end_s}".encode(), "sha256").hex()


def csrf_token(session: str) -> str:
    """What a page sends with each change in a session: who cannot read the page cannot know it."""
    return hmac.digest(session.encode(), b"batchway csrf", "sha256").hex()
