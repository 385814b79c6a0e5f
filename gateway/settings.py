"""The gateway's settings: environment variables, read once and then frozen."""

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
    """A validator: `parse` may raise ValueError. The text is kept unparsed."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]  # separated by commas
_Key = Annotated[str, Field(min_length=16)]


class GatewaySettings(BaseSettings):
    """All settings of a gateway. The environment variable is `variable(name)`.

    Names end in their unit: seconds, bytes or tokens. Arguments take precedence over the
    environment.
    """

    model_config = SettingsConfigDict(
        env_prefix="BATCHWAY_",
        env_ignore_empty=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # an input may be a key
    )

    redis_url: str = Field(validation_alias=AliasChoices("redis_url", "REDIS_URL"), repr=False)
    namespace: str = "default"
    # Permits everything; exists besides the keys in Redis.
    api_key: _Key | None = Field(default=None, repr=False)
    key_pepper: _Key | None = Field(default=None, repr=False)  # None: Redis keeps one
    require_key: bool = False  # even while no key exists
    allowed_hosts: _Names = ()  # (): loopback names; any if a key is required
    sync_deadline_s: PositiveFloat = 120.0
    sync_limit_s: NonNegativeFloat = 0.0  # 0: the platform's limit, if it reports one
    job_deadline_s: PositiveFloat = 86_400.0
    sync_retention_s: PositiveFloat = 600.0
    job_retention_s: PositiveFloat = 86_400.0
    max_retention_s: PositiveFloat = 30 * 86_400.0
    # A directory or s3://bucket/prefix; "": everything is in Redis.
    object_store: Annotated[str, _read_by(open_store)] = ""
    object_min_bytes: PositiveInt = 16 * 1024
    result_url_s: PositiveFloat = 3_600.0
    # Private addresses that callbacks may reach, for development.
    callback_allow: Annotated[_Names, _read_by(AllowList.parse)] = ()
    callback_aws: _Names = ()  # patterns of AWS resources that callbacks may use
    # Used only to know which callbacks need no secret of their own.
    callback_secrets: Annotated[str, _read_by(Secrets.parse)] = Field(default="", repr=False)
    models: str = ""  # models.yaml, whose flows this gateway publishes and runs; "": none
    max_body_bytes: PositiveInt = 4 * 1024 * 1024  # 32 for each of 131,072 tokens
    body_timeout_s: PositiveFloat = 10.0
    max_file_bytes: PositiveInt = 200 * 10**6
    max_tenant_file_bytes: NonNegativeInt = 10 * 10**9  # of all files of a tenant; 0: no limit
    file_lifetime_s: Annotated[float, Field(ge=3_600, le=30 * 86_400)] = 30 * 86_400.0
    upload_timeout_s: PositiveFloat = 600.0  # of a file
    max_batch_lines: PositiveInt = 50_000
    # Of one batch, waiting or running at a time.
    max_batch_jobs: Annotated[int, Field(ge=64)] = 256
    # Of a token in the lane `batch`, where tokens per minute are counted.
    batch_price: Annotated[float, Field(ge=0, le=1)] = 1.0
    feeds_batches: bool = True  # whether this gateway runs batches
    head_timeout_s: PositiveFloat = 10.0
    idle_timeout_s: PositiveFloat = 30.0  # until a request's first byte
    max_connections_per_address: NonNegativeInt = 1_024  # 0: unlimited
    max_calls_per_key: NonNegativeInt = 1_024  # concurrent; 0: unlimited
    max_output_tokens: PositiveInt = 32_768
    default_output_tokens: PositiveInt = 4_096
    clip_max_tokens: bool = True  # to the room in the context; False: reject
    lane_bound_tokens: NonNegativeInt | None = None  # None: by Redis's memory; 0: no limit
    lane_bound_s: NonNegativeFloat | None = None  # predicted wait; None: by the lane; 0: no limit
    # Of single lanes: `batch=500000`, `interactive=2s`.
    lane_bounds: Annotated[_Names, _read_by(parse_lane_bounds)] = ()
    # of all jobs; None: by Redis's memory; 0: no limit
    max_stored_bytes: NonNegativeInt | None = None
    max_tenant_stored_bytes: NonNegativeInt | None = None  # of one tenant; None: half of all
    cold_start_s: NonNegativeFloat = 30.0  # until the first worker is up, if there is none
    heartbeat_s: PositiveFloat = 10.0
    poll_s: PositiveFloat = 1.0
    max_buffer_bytes: PositiveInt = 256 * 1024
    stall_timeout_s: PositiveFloat = 30.0
    outage_grace_s: NonNegativeFloat = 30.0
    breaker_open_s: PositiveFloat = 0.5
    attendance_s: PositiveFloat = 30.0
    drain_s: NonNegativeFloat = 20.0
    embedded_metrics: bool = False  # writes a line for CloudWatch after each request

    def bound_of(self, lane: str, memory_bytes: int) -> tuple[int, float]:
        """The limits of a lane in tokens and predicted seconds; 0: none. `memory_bytes`: of Redis.
        A lane's own setting takes precedence over the setting for all lanes, and that over the
        default."""
        own = parse_lane_bounds(self.lane_bounds).get(lane, LaneBound())
        default = tokens_in(memory_bytes), default_wait_s(lane, self.sync_deadline_s)
        tokens = (own.tokens, self.lane_bound_tokens, default[0])
        seconds = (own.wait_s, self.lane_bound_s, default[1])
        return (
            next(bound for bound in tokens if bound is not None),
            next(bound for bound in seconds if bound is not None),
        )

    def stored_bounds(self, memory_bytes: int) -> tuple[int, int]:
        """The bytes that may be stored, of all jobs and of one tenant's; 0: no limit.
        `memory_bytes`: of Redis."""
        whole = self.max_stored_bytes
        if whole is None:
            whole = stored_bytes_beside(memory_bytes)
        own = self.max_tenant_stored_bytes
        return whole, int(TENANT_SHARE * whole) if own is None else own

    @property
    def wants_key(self) -> bool:
        """Whether every call needs a key, even if Redis has none."""
        return self.require_key or self.api_key is not None

    def allowed_targets(self) -> AllowList:
        """Private addresses that callbacks may reach. Raises ValueError."""
        return AllowList.parse(self.callback_allow)

    def known_secrets(self) -> Secrets:
        """Secrets that sign callbacks without a secret of their own. Raises ValueError."""
        return Secrets.parse(self.callback_secrets)

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Reads the environment; `overrides` (from a command line) take precedence.

        Raises ValueError, which names each wrong variable.
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
