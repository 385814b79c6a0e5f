"""The gateway's settings: environment variables, read once and then frozen."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from ipaddress import ip_network
from typing import Annotated, Any, ClassVar, Self

import msgspec
from msgspec.structs import replace
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

from contract.callback_urls import AllowList
from contract.callbacks import Secrets
from contract.partitions import MAX_PARTITIONS
from contract.payloads import open_store

_ENTRY = re.compile(r"([a-z][a-z0-9_-]{0,31})\s*=\s*(\d+|\d+(?:\.\d+)?s)")
# RFC 6454, section 6.2, all of it ASCII; desktop programs have schemes of their own.
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
_PORTS = {"http": 80, "https": 443}


class LaneBound(msgspec.Struct, frozen=True):
    """Limits of one lane: the tokens that wait, prompts plus expected output, and the predicted
    wait. 0: no limit, None: the default."""

    tokens: int | None = None
    wait_s: float | None = None


def parse_lane_bounds(entries: Iterable[str]) -> Mapping[str, LaneBound]:
    """Limits by lane, of entries such as `batch=500000` or `interactive=2s`: a number counts
    tokens, one with an `s` is the predicted wait. A lane may have one of each kind. Raises
    ValueError."""
    bounds: dict[str, LaneBound] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"must be like batch=500000 or interactive=2s, not {entry!r}")
        lane, value = match[1], match[2]
        bound = bounds.get(lane, LaneBound())
        if value.endswith("s"):
            bounds[lane] = replace(bound, wait_s=float(value[:-1]))
        else:
            bounds[lane] = replace(bound, tokens=int(value))
    assert all(math.isfinite(bound.wait_s or 0.0) for bound in bounds.values())
    return bounds


def origin_of(text: str) -> str | None:
    """An origin as browsers write it: in small letters, without the port that its scheme implies;
    None if the text is none."""
    match = _ORIGIN.fullmatch(text.lower()) if text.isascii() else None
    if match is None:
        return None
    scheme, host, port = match.groups()
    has_port = port is not None and int(port) != _PORTS.get(scheme)
    return f"{scheme}://{host}" + (f":{int(port)}" if has_port else "")


def _origins(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if text != "*" and origin_of(text) is None:
            raise ValueError(f"{text!r} is no origin such as https://app.example.com, nor `*`")
    return tuple(origin_of(text) or text for text in texts)


def proxies_of(texts: tuple[str, ...]) -> AllowList:
    """Addresses and networks, by default this machine. Raises ValueError for names."""
    return AllowList(tuple(map(ip_network, texts or ("127.0.0.1", "::1"))))


def _split(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    return tuple(part.strip() for part in raw.split(",") if part.strip())


def _read_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Returns a validator that keeps the text unparsed. `parse` may raise ValueError."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _set(default: Any, description: str) -> Any:
    return Field(default, description=description)


def _secret(default: Any, description: str) -> Any:
    return Field(default, description=description, repr=False)


_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]  # separated by commas
_Key = Annotated[str, Field(min_length=16)]


class GatewaySettings(BaseSettings):
    """All settings of a gateway. The environment variable is `variable(name)`.

    Names end in their unit: seconds, bytes or tokens. Arguments take precedence over the
    environment. docs/options.md shows the descriptions.
    """

    model_config = SettingsConfigDict(
        env_prefix="BATCHWAY_",
        env_ignore_empty=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # an input may be a key
    )

    # What nobody has had to set.
    job_deadline_s: ClassVar[float] = 86_400.0  # of a job that sets none
    first_timeout_s: ClassVar[float] = 30.0  # until the first byte of a new connection
    head_timeout_s: ClassVar[float] = 10.0  # for a request's headers
    body_timeout_s: ClassVar[float] = 10.0
    stall_timeout_s: ClassVar[float] = 30.0  # of a client that accepts no data (Linux)
    max_calls_per_key: ClassVar[int] = 1_024  # concurrent, to one process
    max_calls_per_token: ClassVar[int] = 32  # of these, of one job's tokens
    max_buffer_bytes: ClassVar[int] = 256 * 1024  # of messages; beyond it the log is read

    redis_url: str = Field(
        validation_alias=AliasChoices("redis_url", "REDIS_URL"),
        repr=False,
        description="Redis 7.0 or later; every command takes it",
    )
    namespace: str = _set("default", "separates installations on one Redis")
    partitions: Annotated[int, Field(ge=1, le=MAX_PARTITIONS)] | None = _set(
        None,
        "of the namespace, fixed when it is made; none: as many as it has, and one in a new one",
    )
    api_key: _Key | None = _secret(
        None, "a key of the tenant `default` with all rights, beside the keys in Redis"
    )
    key_pepper: _Key | None = _secret(
        None,
        "keys the digests of API keys, the same for all gateways and `batchway keys`; Redis "
        "keeps one if none is given",
    )
    require_key: bool = _set(
        False,
        "whether nobody is served without a key, even while no key exists; set it behind a proxy",
    )
    allowed_hosts: _Names = _set(
        (),
        "accepted Host names; `*`: any. By default loopback names, and any where a key is required",
    )
    allowed_origins: Annotated[_Names, AfterValidator(_origins)] = _set(
        (),
        "origins of other sites whose pages may call, by commas; `*`: any, without cookies",
    )
    trusted_proxies: Annotated[_Names, _read_by(proxies_of)] = _set(
        (),
        "addresses and networks of proxies, whose `X-Forwarded-Proto` and `X-Forwarded-Host` hold. "
        "By default this machine's",
    )
    sync_deadline_s: PositiveFloat = _set(120.0, "the deadline of a synchronous call")
    sync_limit_s: NonNegativeFloat = _set(
        0.0,
        "a longer call becomes a job; set it two seconds below a proxy's limit. 0: the "
        "platform's limit, if it reports one",
    )
    sync_retention_s: PositiveFloat = _set(
        600.0, "how long the output of a synchronous call is kept"
    )
    job_retention_s: PositiveFloat = _set(
        86_400.0, "how long a job is kept whose body and key do not say"
    )
    max_retention_s: PositiveFloat = _set(
        30 * 86_400.0, "the longest retention that a job may ask for"
    )
    object_store: Annotated[str, _read_by(open_store)] = _set(
        "",
        "keeps long prompts and results: a directory, or s3://bucket/prefix; without it they "
        "are in Redis",
    )
    prefers_cached: bool = _set(
        True, "whether jobs prefer the worker whose cache has their prompt's beginning or session"
    )
    warms_next_turn: bool = _set(
        False,
        "whether idle workers compute what likely begins the next turn; needs `prefers_cached`",
    )
    object_min_bytes: PositiveInt = _set(16 * 1024, "shorter prompts stay in Redis")
    result_url_s: PositiveFloat = _set(3_600.0, "how long a `result_url` is valid")
    callback_allow: Annotated[_Names, _read_by(AllowList.parse)] = _set(
        (), "private addresses that callbacks may reach, for development"
    )
    callback_aws: _Names = _set((), "patterns of AWS resources that callbacks may use")
    callback_secrets: Annotated[str, _read_by(Secrets.parse)] = _secret(
        "", "secrets that sign callbacks without a secret of their own"
    )
    models: str = _set("", "the `models.yaml` whose flows this gateway publishes and runs")
    declared_models: _Names = _set(
        (),
        "models whose workers are started on demand; a call of one that no worker has announced "
        "yet starts the first",
    )
    max_body_bytes: PositiveInt = _set(
        4 * 1024 * 1024,
        "the longest decoded body: 32 bytes for each of 131,072 tokens. English takes 4 to 5 "
        "bytes a token, Cyrillic in JSON escapes 18, token ids 8",
    )
    max_file_bytes: PositiveInt = _set(200 * 10**6, "the longest file")
    max_tenant_file_bytes: NonNegativeInt = _set(10 * 10**9, "all files of a tenant; 0: no limit")
    file_lifetime_s: Annotated[float, Field(ge=3_600, le=30 * 86_400)] = _set(
        30 * 86_400.0, "of files without `expires_after`"
    )
    upload_timeout_s: PositiveFloat = _set(600.0, "the time for an upload")
    max_batch_lines: PositiveInt = _set(50_000, "the lines of a batch")
    max_batch_jobs: Annotated[int, Field(ge=64)] = _set(
        256, "the jobs of a batch that wait or run at a time"
    )
    batch_price: Annotated[float, Field(ge=0, le=1)] = _set(
        1.0,
        "what a token in the lane `batch` counts in a tenant's tokens per minute; the same for "
        "all gateways",
    )
    cached_price: Annotated[float, Field(ge=0, le=1)] = _set(
        1.0,
        "what a prompt's token that was found in a prefix cache counts there; the same for all "
        "gateways",
    )
    feeds_batches: bool = _set(True, "whether this gateway runs batches")
    idle_timeout_s: PositiveFloat = _set(
        75.0, "how long a connection is kept between requests; longer than a load balancer does"
    )
    max_connections_per_address: NonNegativeInt = _set(
        1_024,
        "of one address (IPv6: /64) to one process; 0: no limit, nor one of their rate. Behind a "
        "proxy 0",
    )
    max_output_tokens: PositiveInt = _set(
        32_768, "the largest `max_tokens`; all choices together eight times as much"
    )
    default_output_tokens: PositiveInt = _set(4_096, "`max_tokens` of a chat without it")
    clip_max_tokens: bool = _set(
        True, "whether `max_tokens` beyond the context is cut to what fits; otherwise it is refused"
    )
    leaves_out_hosted_tools: bool = _set(
        True, "whether tools such as `web_search` are left out of a response's; otherwise refused"
    )
    lane_bound_tokens: NonNegativeInt | None = _set(
        None, "the tokens that may wait in a lane; 0: no limit. By default by Redis's memory"
    )
    lane_bound_s: NonNegativeFloat | None = _set(
        None, "the longest predicted wait in a lane; 0: no limit. By default by the lane"
    )
    lane_bounds: Annotated[_Names, _read_by(parse_lane_bounds)] = _set(
        (), "bounds of single lanes: `interactive=2s,batch=500000`; 0 or `0s`: no limit"
    )
    max_tenant_stored_bytes: NonNegativeInt | None = _set(
        None, "the kept jobs of a tenant, beyond it 429; 0: no limit. By default half of all"
    )
    cold_start_s: NonNegativeFloat = _set(30.0, "added to predicted waits while no worker lives")
    heartbeat_s: PositiveFloat = _set(
        10.0, "a stream that is silent so long sends an empty line or a comment"
    )
    poll_s: PositiveFloat = _set(1.0, "how often a log is read, as messages may be lost")
    outage_grace_s: NonNegativeFloat = _set(30.0, "how long a stream waits for Redis")
    breaker_open_s: PositiveFloat = _set(
        0.5, "how long calls are refused at once after Redis failed"
    )
    attendance_s: PositiveFloat = _set(
        30.0, "when a gateway dies, the job of a synchronous call waits so long for its caller"
    )
    drain_s: NonNegativeFloat = _set(20.0, "how long streams may go on at shutdown")
    console: bool = _set(True, "whether `/`, `/docs` and `/console` are served; never on Lambda")
    worker_price: NonNegativeFloat = _set(
        0.0, "of one worker for an hour; from it `/console` has the cost of tokens and jobs"
    )
    embedded_metrics: bool = _set(
        False, "whether counts are printed for CloudWatch after each request"
    )

    @cached_property
    def bounds_of_lanes(self) -> Mapping[str, LaneBound]:
        """The bounds of single lanes."""
        return parse_lane_bounds(self.lane_bounds)

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
