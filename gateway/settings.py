"""What an operator may set of a gateway: environment variables, read once, frozen afterwards."""

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from contract.addresses import AllowList
from contract.callback_secrets import Secrets
from contract.payloads import open_store
from gateway.lane_bounds import (
    TENANT_SHARE,
    LaneBound,
    default_wait_s,
    parse_lane_bounds,
    stored_bytes_beside,
    tokens_in,
)


def _split(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    return tuple(part.strip() for part in raw.split(",") if part.strip())


def _read_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Refuses what `parse` refuses with a ValueError; keeps the text."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]  # separated by commas
_Key = Annotated[str, Field(min_length=16)]


class GatewaySettings(BaseSettings):
    """Every setting of a gateway; the environment variable is `variable(name)`.

    Seconds, bytes and tokens, as the names say. What is passed here wins over the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix="BATCHWAY_",
        env_ignore_empty=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may be a key
    )

    redis_url: str = Field(validation_alias=AliasChoices("redis_url", "REDIS_URL"), repr=False)
    namespace: str = "default"
    # For everything, beside the keys in Redis.
    api_key: _Key | None = Field(default=None, repr=False)
    key_pepper: _Key | None = Field(default=None, repr=False)  # None: the one that Redis keeps
    require_key: bool = False  # also while no key exists
    allowed_hosts: _Names = ()  # (): loopback names, or any where a key is always wanted
    sync_deadline_s: PositiveFloat = 120.0
    sync_limit_s: NonNegativeFloat = 0.0  # 0: none but what the platform tells
    job_deadline_s: PositiveFloat = 86_400.0
    sync_retention_s: PositiveFloat = 600.0
    job_retention_s: PositiveFloat = 86_400.0
    max_retention_s: PositiveFloat = 30 * 86_400.0
    # A directory or s3://bucket/prefix; "": all lies in Redis.
    object_store: Annotated[str, _read_by(open_store)] = ""
    object_min_bytes: PositiveInt = 16 * 1024
    result_url_s: PositiveFloat = 3_600.0
    # Private addresses that callbacks may reach: development.
    callback_allow: Annotated[_Names, _read_by(AllowList.parse)] = ()
    callback_aws: _Names = ()  # patterns of what they may reach in AWS
    # Only to know who needs to bring none.
    callback_secrets: Annotated[str, _read_by(Secrets.parse)] = Field(default="", repr=False)
    max_body_bytes: PositiveInt = 256 * 1024
    body_timeout_s: PositiveFloat = 10.0
    head_timeout_s: PositiveFloat = 10.0
    idle_timeout_s: PositiveFloat = 30.0  # before a request's first byte
    max_connections_per_address: NonNegativeInt = 1_024  # 0: any number
    max_calls_per_key: NonNegativeInt = 1_024  # at a time; 0: any number
    max_output_tokens: PositiveInt = 32_768
    default_output_tokens: PositiveInt = 4_096
    clip_max_tokens: bool = True  # to the room in the context; False: refuse
    lane_bound_tokens: NonNegativeInt | None = None  # None: what Redis has memory for; 0: no bound
    lane_bound_s: NonNegativeFloat | None = None  # predicted wait; None: by the lane; 0: no bound
    # Of single lanes: `batch=500000`, `interactive=2s`.
    lane_bounds: Annotated[_Names, _read_by(parse_lane_bounds)] = ()
    max_stored_bytes: NonNegativeInt | None = None  # of all jobs; None: by Redis; 0: no bound
    max_tenant_stored_bytes: NonNegativeInt | None = None  # of one tenant's; None: half of that
    cold_start_s: NonNegativeFloat = 30.0  # until a first worker is up, where none lives
    heartbeat_s: PositiveFloat = 10.0
    poll_s: PositiveFloat = 1.0
    max_buffer_bytes: PositiveInt = 256 * 1024
    stall_timeout_s: PositiveFloat = 30.0
    outage_grace_s: NonNegativeFloat = 30.0
    breaker_open_s: PositiveFloat = 0.5
    attendance_s: PositiveFloat = 30.0
    drain_s: NonNegativeFloat = 20.0
    embedded_metrics: bool = False  # a line for CloudWatch after each request

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
    def from_env(cls, **overrides: Any) -> Self:
        """Settings from environment variables; `overrides` win, for what a command line gave.

        Raises ValueError that names each wrong variable.
        """
        try:
            return cls(**overrides)
        except ValidationError as exc:
            wrong = (
                f"{variable(str(error['loc'][0]))}: {error['msg'].removeprefix('Value error, ')}"
                for error in exc.errors()
            )
            raise ValueError("; ".join(wrong)) from exc


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return "REDIS_URL" if name == "redis_url" else f"BATCHWAY_{name.upper()}"
