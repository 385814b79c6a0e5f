"""API keys in Redis: the tenant of a caller, its rights and its limits.

A key is `bw-<prefix>-<secret>` with 256 random bits. It is shown once. Redis holds its HMAC-SHA256
under a pepper; a key is looked up by its prefix and compared in constant time.
"""

import hashlib
import hmac
import re
import secrets
from enum import StrEnum
from typing import Any

import msgspec
import redis.asyncio

from contract.codec import wire_errors
from contract.connection import broker_errors, now_ms, repeated
from contract.jobs import MAX_WEIGHT, MIN_WEIGHT
from contract.keys import Keys

_PREFIX_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without characters that look alike
_PREFIX_CHARS = 8
_SECRET_BYTES = 32
_KEY = re.compile(rf"bw-([a-z0-9]{{{_PREFIX_CHARS}}})-[0-9a-f]{{{2 * _SECRET_BYTES}}}")
# Names of keys in Redis contain the tenant's name.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_tenant(name: str) -> bool:
    """Whether a tenant may have this name."""
    return _TENANT.fullmatch(name) is not None


class Scope(StrEnum):
    """What a key permits; `admin` includes the others."""

    INFERENCE = "inference"
    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    TEMPLATES = "templates"  # of calls' own, which are programs in a sandbox
    METRICS = "metrics"  # of the whole installation, therefore not a default
    ADMIN = "admin"


DEFAULT_SCOPES = (Scope.INFERENCE, Scope.JOBS_READ, Scope.JOBS_WRITE)
MIN_RETENTION_S = 60.0  # after a job's end: its caller must have time to read the result


class KeyTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tenant, rights and limits of a key.

    All keys of a tenant share its limits. Where its keys differ, those of the key in use apply, and
    the `weight` of the key whose job was accepted last. A limit of 0 means none, a retention of 0
    the installation's. Raises ValueError.
    """

    tenant: str
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    lanes: tuple[str, ...] = ()  # (): every lane
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_tokens: int = 0
    lane_share: float = 0.0  # of a lane's bound, 0 to 1
    weight: float = 1.0  # tenants share a lane in proportion to their weights
    retention_s: float = 0.0  # of jobs that request none

    def __post_init__(self) -> None:
        if not is_tenant(self.tenant):
            raise ValueError(
                "a tenant is named by at most 64 letters, digits and ._- that begin with one of "
                "the first two"
            )
        if min(self.requests_per_minute, self.tokens_per_minute, self.concurrent_tokens) < 0:
            raise ValueError("a limit may not be negative")
        if not 0.0 <= self.lane_share <= 1.0:
            raise ValueError(f"lane_share is a share, not {self.lane_share}")
        if self.retention_s and not self.retention_s >= MIN_RETENTION_S:
            raise ValueError(f"a retention is {MIN_RETENTION_S:g} s or more")
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"a weight is a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable part of a key's record."""

    digest: str
    pepper_id: str
    terms: KeyTerms
    created_ms: int


class ApiKey(_Stored, frozen=True, kw_only=True):
    """A key's record. Times are Unix milliseconds of the Redis clock; `now_ms`: of reading."""

    prefix: str
    expires_ms: int | None
    revoked_ms: int | None
    now_ms: int

    @property
    def state(self) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_in_s <= 0 else "active"

    @property
    def expires_in_s(self) -> float:
        """Seconds until the key expires, at the time of reading; `inf` without an end."""
        if self.expires_ms is None:
            return float("inf")
        return (self.expires_ms - self.now_ms) / 1000


class Pepper(msgspec.Struct, frozen=True):
    """The key of the digests. Its id identifies it without revealing it."""

    secret: bytes

    @property
    def id(self) -> str:
        return hmac.digest(self.secret, b"batchway pepper id", "sha256").hex()[:8]

    def digest(self, key: str) -> str:
        return hmac.digest(self.secret, key.encode(), "sha256").hex()


def prefix_of(key: str) -> str | None:
    """The prefix of a key; None where the text is not a key."""
    match = _KEY.fullmatch(key)
    return match[1] if match else None


def is_same_key(given: str, record: ApiKey | None, pepper: Pepper) -> bool:
    """Whether a key matches a record. Takes as long for an unknown key as for a wrong one."""
    digest = pepper.digest(given)
    known = record.digest if record is not None else hashlib.sha256(b"").hexdigest()
    return hmac.compare_digest(digest, known) and record is not None


class ApiKeys:
    """The keys of one installation. Every method raises BrokerUnavailable.

    The pepper is the operator's, or the first `create` makes one and stores it in Redis.
    """

    def __init__(
        self, client: redis.asyncio.Redis, keys: Keys, pepper: Pepper | None = None
    ) -> None:
        self._client = client
        self._keys = keys
        self._pepper = pepper

    async def exist(self) -> bool:
        """Whether a key was ever made, including revoked ones: from then on callers need a key."""
        with broker_errors(self._client, "EXISTS"):
            return await self._client.exists(self._keys.of("api_keys")) == 1

    async def pepper(self) -> Pepper | None:
        """The pepper in force; None where no key was ever made."""
        if self._pepper is None:
            with broker_errors(self._client, "GET", record="pepper"):
                raw: Any = await self._client.get(self._keys.of("key_pepper"))
            self._pepper = None if raw is None else Pepper(raw)
        return self._pepper

    async def create(self, terms: KeyTerms, *, lifetime_s: float | None = None) -> tuple[str, str]:
        """Creates a key. Returns it and its prefix. The key itself is not stored."""
        prefix = "".join(secrets.choice(_PREFIX_ALPHABET) for _ in range(_PREFIX_CHARS))
        key = f"bw-{prefix}-{secrets.token_hex(_SECRET_BYTES)}"
        pepper = await self._some_pepper()
        created_ms = await now_ms(self._client)
        stored = _Stored(
            digest=pepper.digest(key), pepper_id=pepper.id, terms=terms, created_ms=created_ms
        )
        fields: dict[Any, Any] = {"record": msgspec.msgpack.encode(stored)}
        if lifetime_s is not None:
            fields["expires"] = created_ms + int(lifetime_s * 1000)
        with broker_errors(self._client, "HSET or SADD"):
            async with self._client.pipeline(transaction=True) as transaction:
                transaction.hset(self._keys.of("api_key", prefix), mapping=fields)
                transaction.sadd(self._keys.of("api_keys"), prefix)
                await transaction.execute()
        return key, prefix

    async def find(self, prefix: str) -> ApiKey | None:
        """Returns a key's record. Raises WireError."""
        with broker_errors(self._client, "HMGET", record="API key record"):
            values: Any = await repeated(
                lambda: self._client.hmget(
                    self._keys.of("api_key", prefix), ["record", "expires", "revoked"]
                )
            )
        raw, expires, revoked = values
        if raw is None:
            return None
        read_ms = await now_ms(self._client)
        with wire_errors("API key record"):
            stored = msgspec.msgpack.decode(raw, type=_Stored)
            return ApiKey(
                prefix=prefix,
                **msgspec.structs.asdict(stored),
                expires_ms=None if expires is None else int(expires),
                revoked_ms=None if revoked is None else int(revoked),
                now_ms=read_ms,
            )

    async def all(self) -> list[ApiKey]:
        """Every key ever made, oldest first. Raises WireError."""
        with broker_errors(self._client, "SMEMBERS", record="list of API keys"):
            prefixes: Any = await self._client.smembers(self._keys.of("api_keys"))
        found = [await self.find(prefix.decode(errors="replace")) for prefix in prefixes]
        return sorted((key for key in found if key is not None), key=lambda key: key.created_ms)

    async def revoke(self, prefix: str) -> bool:
        """Revokes a key; False where there is none."""
        if await self.find(prefix) is None:
            return False
        with broker_errors(self._client, "HSETNX"):
            await self._client.hsetnx(
                self._keys.of("api_key", prefix), "revoked", await now_ms(self._client)
            )
        return True

    async def rotate(
        self, prefix: str, *, overlap_s: float, lifetime_s: float | None = None
    ) -> tuple[str, str] | None:
        """Creates a key with the terms of an active one, which expires after at most `overlap_s`
        seconds. Returns the new key and its prefix; None if the old key is not active."""
        old = await self.find(prefix)
        if old is None or old.state != "active":
            return None
        made = await self.create(old.terms, lifetime_s=lifetime_s)
        if overlap_s < old.expires_in_s:
            ends_ms = old.now_ms + int(overlap_s * 1000)
            with broker_errors(self._client, "HSET"):
                await self._client.hset(self._keys.of("api_key", prefix), "expires", ends_ms)
        return made

    async def _some_pepper(self) -> Pepper:
        """The pepper in force, created where there is none."""
        if (pepper := await self.pepper()) is None:
            with broker_errors(self._client, "SET"):
                await self._client.set(
                    self._keys.of("key_pepper"), secrets.token_bytes(_SECRET_BYTES), nx=True
                )
            pepper = await self.pepper()
        assert pepper is not None
        return pepper
