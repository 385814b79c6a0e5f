"""API keys, looked up in Redis and cached for a moment; the sessions of browsers; and tokens, each
of which stands for a key at one job.

Every gateway refuses a revoked key within REMEMBERED_S.

A session or a token stands for a key until its end. No gateway keeps it: it names the key, its end
and the job, under a signature that needs the key's digest and the pepper, so it ends with its key.
"""

import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from cachetools import TTLCache
from msgspec.structs import replace

from contract.api_keys import ApiKey, ApiKeys, KeyTerms, Scope, is_same_key, prefix_of

log = logging.getLogger("batchway.gateway")

REMEMBERED_S = 2.0  # seconds; revocation is promised within 5
MAX_REMEMBERED = 10_000  # cached prefixes; guesses must not fill the memory
SESSION_S = 3600.0
# A stream that a token has opened outlives it by a minute at most.
OVERTIME_S = 60.0 - REMEMBERED_S
DEFAULT_TENANT = "default"
EVERYTHING = KeyTerms(tenant=DEFAULT_TENANT, scopes=(Scope.ADMIN,))
_OWN = "operator"  # in place of a prefix; no prefix has an `o`
# A session, or a token with its job.
_SIGNED = re.compile(
    r"bw[sj]-(?P<prefix>[a-z0-9]{8})-(?P<end_s>[0-9]{10,12})-"
    r"(?:(?P<job_id>job-[0-9]{1,4}-[0-9a-f]{32})-)?(?P<signature>[0-9a-f]{64})"
)

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

    async def terms_of(self, key: str, *, is_streaming: bool = False) -> KeyTerms | None:
        """The terms of a key, a session or a token; None if it is wrong, expired or revoked.
        `is_streaming`: it has opened a stream before."""
        if (found := _SIGNED.fullmatch(key)) is not None:
            return await self._terms_of_signed(**found.groupdict(), is_streaming=is_streaming)
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

    async def job_token(
        self, key_name: str, job_id: str, lifetime_s: int
    ) -> tuple[str, int] | None:
        """A token for one job, and its end in Unix seconds; None if the key, by its `name_of`, is
        no longer valid. Where nobody needs a key it ends with the first one."""
        prefix, end_s = key_name or _OWN, int(time.time()) + lifetime_s
        signer = await self._signer(prefix)
        if signer is None:
            return None
        return f"bwj-{prefix}-{end_s}-{job_id}-{_signature(signer, end_s, job_id)}", end_s

    async def _terms_of_signed(
        self, prefix: str, end_s: str, job_id: str | None, signature: str, *, is_streaming: bool
    ) -> KeyTerms | None:
        signer = await self._signer(prefix)
        overtime_s = OVERTIME_S if is_streaming and job_id else 0.0
        if signer is None or time.time() >= int(end_s) + overtime_s:
            return None
        if not hmac.compare_digest(signature, _signature(signer, int(end_s), job_id)):
            return None
        return signer[1] if job_id is None else _of_token(signer[1])

    async def _signer(self, prefix: str) -> tuple[bytes, KeyTerms] | None:
        """The secret that signs the sessions and tokens of an active key, and its terms."""
        if prefix == _OWN and self._own_key is not None:
            return self._own_key.encode(), EVERYTHING
        if prefix == _OWN and not await self.wants_key():
            return b"nobody needs a key", EVERYTHING
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
    """What tells keys apart without revealing them, of a valid key, or what stands for one."""
    signed = _SIGNED.fullmatch(key)
    return signed["prefix"] if signed is not None else prefix_of(key) or _OWN


def job_of(key: str) -> str:
    """The job of a token, which need not be valid; '' for whatever is none."""
    signed = _SIGNED.fullmatch(key)
    return (signed["job_id"] or "") if signed is not None else ""


def _of_token(terms: KeyTerms) -> KeyTerms:
    """What a token permits: no more than its key does."""
    is_admin = Scope.ADMIN in terms.scopes
    scopes = (Scope.JOBS_READ, Scope.JOBS_WRITE)
    return replace(terms, scopes=tuple(s for s in scopes if is_admin or s in terms.scopes))


def _signature(signer: tuple[bytes, KeyTerms], end_s: int, job_id: str | None = None) -> str:
    signed = f"batchway {job_id or 'session'} {end_s}"
    return hmac.digest(signer[0], signed.encode(), "sha256").hex()


def csrf_token(session: str) -> str:
    """What a page sends with each change in a session: who cannot read the page cannot know it."""
    return hmac.digest(session.encode(), b"batchway csrf", "sha256").hex()
