"""What an operator may set of a gateway. Read once at the edge, frozen afterwards."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from contract.addresses import AllowList
from contract.callback_secrets import Secrets
from contract.payloads.opening import open_store
from gateway.lane_bounds import (
    TENANT_SHARE,
    LaneBound,
    default_wait_s,
    parse_lane_bounds,
    stored_bytes_beside,
    tokens_in,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Every setting of a gateway; the environment variable is `variable(name)`.

    Seconds, bytes and tokens, as the names say. Raises ValueError for values that cannot work.
    """

    redis_url: str = field(repr=False)
    namespace: str = "default"
    api_key: str | None = field(default=None, repr=False)  # for everything, beside those in Redis
    key_pepper: str | None = field(default=None, repr=False)  # None: the one that Redis keeps
    require_key: bool = False  # also while no key exists
    allowed_hosts: tuple[str, ...] = ()  # (): loopback names, or any where a key is always wanted
    sync_deadline_s: float = 120.0
    sync_limit_s: float = 0.0  # 0: none but what the platform tells
    job_deadline_s: float = 86_400.0
    sync_retention_s: float = 600.0
    job_retention_s: float = 86_400.0
    max_retention_s: float = 30 * 86_400.0
    object_store: str = ""  # a directory or s3://bucket/prefix; "": all lies in Redis
    object_min_bytes: int = 16 * 1024
    result_url_s: float = 3_600.0
    callback_allow: tuple[str, ...] = ()  # private addresses that callbacks may reach: development
    callback_aws: tuple[str, ...] = ()  # patterns of what they may reach in AWS
    callback_secrets: str = field(default="", repr=False)  # only to know who needs to bring none
    max_body_bytes: int = 256 * 1024
    body_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 30.0  # before a request's first byte
    max_connections_per_address: int = 1_024  # 0: any number
    max_calls_per_key: int = 1_024  # at a time; 0: any number
    max_output_tokens: int = 32_768
    default_output_tokens: int = 4_096
    clip_max_tokens: bool = True  # to the room in the context; False: refuse
    lane_bound_tokens: int | None = None  # None: what Redis has memory for; 0: no bound
    lane_bound_s: float | None = None  # predicted wait; None: by the lane; 0: no bound
    lane_bounds: tuple[str, ...] = ()  # of single lanes: `batch=500000`, `interactive=2s`
    max_stored_bytes: int | None = None  # of all jobs that are kept; None: by Redis; 0: no bound
    max_tenant_stored_bytes: int | None = None  # of one tenant's; None: half of that
    cold_start_s: float = 30.0  # until a first worker is up, where none lives
    heartbeat_s: float = 10.0
    poll_s: float = 1.0
    max_buffer_bytes: int = 256 * 1024
    stall_timeout_s: float = 30.0
    outage_grace_s: float = 30.0
    breaker_open_s: float = 0.5
    attendance_s: float = 30.0
    drain_s: float = 20.0
    embedded_metrics: bool = False  # a line for CloudWatch after each request

    def __post_init__(self) -> None:
        if self.api_key is not None and len(self.api_key) < 16:
            raise ValueError("the API key must have at least 16 characters")
        if self.key_pepper is not None and len(self.key_pepper) < 16:
            raise ValueError("BATCHWAY_KEY_PEPPER must have at least 16 characters")
        try:
            open_store(self.object_store)
        except ValueError as exc:
            raise ValueError(f"{variable('object_store')}: {exc}") from exc
        for name, parse in (("allow", self.allowed_targets), ("secrets", self.known_secrets)):
            try:
                parse()
            except ValueError as exc:
                raise ValueError(f"{variable(f'callback_{name}')}: {exc}") from exc
        try:
            parse_lane_bounds(self.lane_bounds)
        except ValueError as exc:
            raise ValueError(f"{variable('lane_bounds')}: {exc}") from exc
        may_be_zero = {
            "require_key",
            "embedded_metrics",
            "clip_max_tokens",
            "sync_limit_s",
            "lane_bound_tokens",
            "lane_bound_s",
            "max_stored_bytes",
            "max_tenant_stored_bytes",
            "max_connections_per_address",
            "max_calls_per_key",
            "cold_start_s",
            "drain_s",
            "outage_grace_s",
        }
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, int | float) and (
                value < 0 or (value == 0 and spec.name not in may_be_zero)
            ):
                raise ValueError(f"{variable(spec.name)} must be positive, not {value}")

    def bound_of(self, lane: str, memory_bytes: int) -> tuple[int, float]:
        """Tokens and predicted seconds that may wait in a lane, on a Redis with so much memory; 0:
        any. What is set for the lane wins over what is set for all, and that over the default."""
        own = parse_lane_bounds(self.lane_bounds).get(lane, LaneBound())
        default = tokens_in(memory_bytes), default_wait_s(lane, self.sync_deadline_s)
        tokens = (own.tokens, self.lane_bound_tokens, default[0])
        seconds = (own.wait_s, self.lane_bound_s, default[1])
        return (
            next(bound for bound in tokens if bound is not None),
            next(bound for bound in seconds if bound is not None),
        )

    def stored_bounds(self, memory_bytes: int) -> tuple[int, int]:
        """Bytes that may be kept of all jobs, and of one tenant's, on a Redis with so much memory;
        0: any."""
        whole = self.max_stored_bytes
        if whole is None:
            whole = stored_bytes_beside(memory_bytes)
        own = self.max_tenant_stored_bytes
        return whole, int(TENANT_SHARE * whole) if own is None else own

    @property
    def wants_key(self) -> bool:
        """Whether nobody is served without a key, whatever Redis knows."""
        return self.require_key or self.api_key is not None

    def allowed_targets(self) -> AllowList:
        """What callbacks may reach beyond public addresses. Raises ValueError."""
        return AllowList.parse(self.callback_allow)

    def known_secrets(self) -> Secrets:
        """What signs callbacks that bring no secret. Raises ValueError."""
        return Secrets.parse(self.callback_secrets)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Self:
        """Settings from environment variables; `overrides` win, for what a command line gave.

        Raises ValueError that names the variable.
        """
        environ = os.environ if environ is None else environ
        given: dict[str, object] = {}
        for spec in fields(cls):
            raw = environ.get(variable(spec.name), "")
            if raw:
                kind = _OPTIONAL.get(spec.type, type(spec.default))
                given[spec.name] = _parse(spec.name, raw, kind)
        given |= overrides
        if "redis_url" not in given:
            raise ValueError("REDIS_URL is not set: a gateway needs to know its Redis")
        return cls(**given)  # type: ignore[arg-type]


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return "REDIS_URL" if name == "redis_url" else f"BATCHWAY_{name.upper()}"


_OPTIONAL: Mapping[object, type] = {int | None: int, float | None: float}  # their default is None


def _parse(name: str, raw: str, kind: type) -> object:
    if kind is tuple:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if kind is bool:
        if raw not in ("0", "1"):
            raise ValueError(f"{variable(name)} must be 0 or 1, not {raw!r}")
        return raw == "1"
    if kind not in (int, float):
        return raw
    try:
        return kind(raw)
    except ValueError as exc:
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"{variable(name)} must be {noun}, not {raw!r}") from exc
