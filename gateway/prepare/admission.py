"""What all calls share on their way to a job: the caller and what its API key permits, the job
without its prompt, the checks of model and lane, and the bounds.

A call that the model cannot run is rejected with 400 and the parameter's name.
"""

import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from fastapi import Depends, Request, Security, params
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi.security import HTTPAuthorizationCredentials as Authorization

from contract.api_keys import KeyTerms, Scope, is_tenant
from contract.endpoints import VECTOR_ENDPOINTS
from contract.errors import BatchwayError
from contract.function_types import Submission, TenantLimits
from contract.jobs import DEFAULT_LANES, Endpoint, Job, SamplingParams, new_job_id
from contract.model_cards import ModelCard
from gateway.http.errors import (
    ApiError,
    bad_request,
    invalid_value,
    no_such_model,
)
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.revocation import watch_key
from gateway.prepare.unsupported import CallFields
from gateway.redis.broker import Broker
from gateway.redis.key_ring import EVERYTHING, KeyRing, csrf_token, name_of
from gateway.redis.known_models import NotAnnounced, model_failed
from gateway.settings import GatewaySettings, LaneBound
from gateway.state import Gateway
from gateway.turns import ConcurrencyCap, Owner, take_turns

SESSION_COOKIE = "batchway_session"
CSRF_HEADER = "x-csrf-token"
_READING = frozenset(("GET", "HEAD"))
ALL_TENANTS = "*"

_LANE_OF_TIER = {"priority": "interactive", "flex": "batch"}
_PREFILL_LANE, _DEFAULT_LANE = "scoring", "standard"
Prompts = tuple[tuple[int, ...], ...]

_NO_PARAMS = SamplingParams(max_tokens=0, seed=0)  # of a job without a prompt

T = TypeVar("T")

INTERACTIVE_TARGET_S = 10.0  # seconds to the first token that an interactive user will wait
_PREDICTED_SHARE = 0.5  # of the available time, because throughput may halve while a job waits
# Bytes in Redis of a job that has run. Measured: 6.5 kB plus 13 bytes per output token, so 32 is an
# upper bound for jobs of 350 tokens or more.
BYTES_PER_TOKEN = 32
WAITING_SHARE = 0.4  # share of Redis's memory for the jobs waiting in a lane
STORED_FACTOR = 8  # times Redis's memory, because most stored data is in the object store
TENANT_SHARE = 0.5  # share of it for one tenant


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller and its key's terms. `key_name` identifies the key without revealing
    it."""

    terms: KeyTerms
    key_name: str
    is_counted: bool = False  # this call, against its tenant's limit of requests

    @property
    def tenant(self) -> str:
        return self.terms.tenant

    @property
    def limits(self) -> TenantLimits:
        terms = self.terms
        return TenantLimits(
            requests_per_min=terms.requests_per_minute,
            tokens_per_min=terms.tokens_per_minute,
            concurrent_tokens=terms.concurrent_tokens,
            lane_share=terms.lane_share,
        )

    def job(
        self, endpoint: Endpoint, body: CallBody | ResponseBody, lane: str = "", job_id: str = ""
    ) -> Job:
        """The caller's job, which has no prompt yet; the lane is by default that of the body's
        service tier. Raises ApiError (403) if the key does not permit the lane."""
        lane = lane or _lane_of(endpoint, body)
        self.check_lane(lane)
        return Job(
            id=job_id or new_job_id(),
            tenant=self.tenant,
            model=body.model,
            lane=lane,
            endpoint=endpoint,
            prompt_ids=(),
            params=_NO_PARAMS,
            created_s=int(time.time()),
            weight=self.terms.weight,
        )

    def call_submission(
        self, settings: GatewaySettings, *, may_become_job: bool, **terms: Any
    ) -> Submission:
        """The terms of a call, or of a job if the caller accepts that the call becomes one: then it
        can also wait for a worker."""
        if may_become_job:
            deadline_s, retention_s = settings.job_deadline_s, self.job_retention_s(settings)
        else:
            deadline_s, retention_s = settings.sync_deadline_s, self.sync_retention_s(settings)
        return self.submission(
            deadline_s=deadline_s,
            retention_s=retention_s,
            needs_worker=not may_become_job,
            **terms,
        )

    def submission(self, *, deadline_s: float, retention_s: float, **terms: Any) -> Submission:
        """The terms of the caller's job, before `admit` sets the bounds. `terms`: fields of
        Submission."""
        return Submission(
            max_output_tokens=0,
            deadline_s=deadline_s,
            retention_s=retention_s,
            limits=self.limits,
            is_counted=self.is_counted,
            **terms,
        )

    def job_retention_s(self, settings: GatewaySettings) -> float:
        """Seconds that a job is kept if its body does not say: the key's value, up to
        the maximum."""
        own_s = self.terms.retention_s or settings.job_retention_s
        return min(own_s, settings.max_retention_s)

    def sync_retention_s(self, settings: GatewaySettings) -> float:
        """Seconds that a synchronous call's output is kept: at most as long as the key's jobs."""
        own_s = self.terms.retention_s or settings.sync_retention_s
        return min(own_s, settings.sync_retention_s)

    def has(self, scope: Scope) -> bool:
        return bool({scope, Scope.ADMIN} & set(self.terms.scopes))

    def tenant_of(self, asked: str, *, may_be_all: bool) -> str:
        """The tenant that a request names, by default the key's own; '' for `*`, all tenants.
        Raises ApiError if that needs the scope `admin`."""
        if asked in ("", self.tenant):
            return self.tenant
        self.check_scope(Scope.ADMIN)
        if asked == ALL_TENANTS and may_be_all:
            return ""
        if not is_tenant(asked):
            raise invalid_value("tenant", "tenant must be the name of one tenant")
        return asked

    def check_scope(self, scope: Scope) -> None:
        """Raises ApiError (403) if the key lacks the scope."""
        if not self.has(scope):
            message = f"this key lacks the scope {scope.value!r}"
            raise ApiError(403, "missing_scope", message)

    def check_lane(self, lane: str) -> None:
        """Raises ApiError (403) if the key does not permit this lane."""
        lanes = self.terms.lanes
        if lanes and lane not in lanes:
            message = f"this key is not for the lane {lane!r}, only for {', '.join(lanes)}"
            raise ApiError(403, "lane_not_allowed", message, param="lane")


_BEARER = HTTPBearer(scheme_name="apiKey", auto_error=False)
# For callers whose Authorization is another's, such as the signature that AWS' IAM asks for.
_HEADER = APIKeyHeader(name="x-api-key", scheme_name="apiKeyHeader", auto_error=False)


async def key_of(
    bearer: Annotated[Authorization | None, Depends(_BEARER)],
    header: Annotated[str | None, Depends(_HEADER)],
) -> str:
    """The API key that a request brings, or nothing."""
    return (bearer.credentials if bearer is not None else header or "").strip()


Key = Annotated[str, Depends(key_of)]


async def identify(request: Request, key: str) -> Caller:
    """Returns the caller. Raises ApiError (401) without a valid key where one is required, and
    BrokerUnavailable if the key could only be checked in Redis."""
    ring: KeyRing = request.app.state.key_ring
    given = key or _session_of(request)
    if given and (terms := await ring.terms_of(given)) is not None:
        watch_key(request, given)
        return Caller(terms, name_of(given))
    if not await ring.wants_key():
        return Caller(EVERYTHING, key_name="")
    raise ApiError(
        401,
        "invalid_api_key",
        "this gateway wants `Authorization: Bearer`, or `x-api-key`, with an API key of its own",
        headers={"www-authenticate": 'Bearer realm="batchway"'},
    )


def _session_of(request: Request) -> str:
    """The session of a browser, if there is one. Raises ApiError (403) if a change lacks its
    token: another site's page can make a browser send the cookie, but cannot read the token."""
    session = request.cookies.get(SESSION_COOKIE, "")
    if session and request.method not in _READING:
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(), csrf_token(session).encode()):
            message = f"a change in a session needs its {CSRF_HEADER}"
            raise ApiError(403, "csrf_token_missing", message)
    return session


class Right(msgspec.Struct, frozen=True):
    """What a route asks of its caller. `is_counted`: the call submits work, so it counts against
    the limit of requests."""

    scopes: tuple[str, ...]
    is_counted: bool


def right_of(endpoint: Callable[..., Any]) -> Right | None:
    """What an endpoint asks of its caller, by the annotations of its own arguments and of those of
    its dependencies; None if it takes no caller."""
    for hint in get_type_hints(endpoint, include_extras=True).values():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, params.Security) and each.dependency in (caller_of, submitter_of):
                return Right(tuple(each.scopes or ()), each.dependency is submitter_of)
            if isinstance(each, params.Depends) and each.dependency is not None:
                found = right_of(each.dependency)
                if found is not None:
                    return found
    return None


@contextlib.asynccontextmanager
async def admitted(request: Request, right: Right) -> AsyncIterator[None]:
    """Holds one of the caller's calls. Raises ApiError: 401, 403 if the key lacks a scope, 429 if
    it has too many calls in progress; JobRefused if its requests of this minute are spent, and
    BrokerUnavailable."""
    caller = await identify(request, await key_of(await _BEARER(request), await _HEADER(request)))
    for scope in right.scopes:
        caller.check_scope(Scope(scope))
    calls: ConcurrencyCap = request.app.state.calls_of_keys
    if not calls.enter(caller.key_name):
        message = f"this key has {calls.cap} calls under way, and may have no more at a time"
        headers = {"x-dropped-reason": "tenant_quota"}
        raise ApiError(429, "too_many_calls", message, headers=headers, retry_after_s=1)
    try:
        gateway: Gateway = request.app.state.gateway
        if right.is_counted and caller.terms.requests_per_minute:
            await gateway.broker.enter(caller.tenant, caller.limits)
            caller = msgspec.structs.replace(caller, is_counted=True)
        request.state.caller = caller
        take_turns(gateway.turns, Owner(caller.terms.tenant, caller.terms.weight))
        yield
    finally:
        calls.leave(caller.key_name)


async def caller_of(request: Request, _key: Key) -> Caller:
    """The caller, as `admitted` has identified it."""
    caller: Caller = request.state.caller
    return caller


async def submitter_of(request: Request, _key: Key) -> Caller:
    """The caller of a call that submits work."""
    return await caller_of(request, _key)


# Dependencies of endpoints, as types of their arguments.
AnyCaller = Annotated[Caller, Security(caller_of)]
Inference = Annotated[Caller, Security(submitter_of, scopes=[Scope.INFERENCE])]
JobsSubmitter = Annotated[Caller, Security(submitter_of, scopes=[Scope.JOBS_WRITE])]
JobsReader = Annotated[Caller, Security(caller_of, scopes=[Scope.JOBS_READ])]
JobsWriter = Annotated[Caller, Security(caller_of, scopes=[Scope.JOBS_WRITE])]
Admin = Annotated[Caller, Security(caller_of, scopes=[Scope.ADMIN])]
MetricsReader = Annotated[Caller, Security(caller_of, scopes=[Scope.METRICS])]


def default_wait_s(lane: str, sync_deadline_s: float) -> float:
    """The default limit of the predicted wait in seconds; 0 for `batch`, where nobody waits for a
    response. In other lanes callers wait at most until a call's deadline."""
    if lane == "batch":
        return 0.0
    target_s = INTERACTIVE_TARGET_S if lane == "interactive" else sync_deadline_s
    return min(target_s, sync_deadline_s) * _PREDICTED_SHARE


def tokens_in(memory_bytes: int) -> int:
    """How many tokens may wait in a lane, so that Redis has memory for their logs."""
    return int(memory_bytes * WAITING_SHARE / BYTES_PER_TOKEN)


def stored_bytes_beside(memory_bytes: int) -> int:
    """The bytes of jobs that may be stored, in Redis and its object store together. A Redis with
    less than 64 MiB counts as one of 64 MiB, because it rejects jobs by itself."""
    return max(memory_bytes, 2**26) * STORED_FACTOR


def bound_of(settings: GatewaySettings, lane: str, memory_bytes: int) -> tuple[int, float]:
    """Returns the limits of a lane in tokens and predicted seconds; 0: none. `memory_bytes`: of
    Redis. A lane's own setting takes precedence over the setting for all lanes, and that over the
    default."""
    own = settings.bounds_of_lanes.get(lane, LaneBound())
    tokens = (own.tokens, settings.lane_bound_tokens, tokens_in(memory_bytes))
    default_s = default_wait_s(lane, settings.sync_deadline_s)
    seconds = (own.wait_s, settings.lane_bound_s, default_s)
    return (
        next(bound for bound in tokens if bound is not None),
        next(bound for bound in seconds if bound is not None),
    )


def stored_bounds(settings: GatewaySettings, memory_bytes: int) -> tuple[int, int]:
    """The bytes that may be stored, of all jobs and of one tenant's (0: no limit). `memory_bytes`:
    of Redis."""
    whole = stored_bytes_beside(memory_bytes)
    own = settings.max_tenant_stored_bytes
    return whole, int(TENANT_SHARE * whole) if own is None else own


def admit(
    settings: GatewaySettings,
    card: ModelCard,
    job: Job,
    submission: Submission,
    memory_bytes: int,
) -> Submission:
    """The submission with the bounds of the lane. `memory_bytes`: of Redis. Raises ApiError if the
    model does not answer such calls in the lane."""
    check_endpoint(card, job.endpoint)
    check_lane(card, job.lane)
    bound_tokens, bound_s = bound_of(settings, job.lane, memory_bytes)
    max_stored_bytes, max_tenant_stored_bytes = stored_bounds(settings, memory_bytes)
    return msgspec.structs.replace(
        submission,
        lane_bound_tokens=bound_tokens,
        lane_bound_s=bound_s,
        batch_price=settings.batch_price,
        max_stored_bytes=max_stored_bytes,
        max_tenant_stored_bytes=max_tenant_stored_bytes,
        cold_start_s=settings.cold_start_s,
        # A response is read again; so may be an answer whose caller has a key to return with.
        is_ephemeral=submission.needs_worker
        and not submission.idempotency_key
        and job.endpoint is not Endpoint.RESPONSES,
    )


def with_prompts(job: Job, card: ModelCard, prompts: Prompts, **fields: Any) -> Job:
    """The job with its prompts and other fields."""
    is_list = len(prompts) > 1
    return msgspec.structs.replace(
        job,
        prompt_ids=() if is_list else prompts[0],
        prompt_list=prompts if is_list else (),
        resume=card.capabilities.resume,
        **fields,
    )


async def unknown_model_error(broker: Broker, model: str, tenant: str) -> BatchwayError:
    """The error for a model that no worker has published. If it is declared, the call is noted as
    demand, in no lane, because its lanes are not known: otherwise its first worker never starts."""
    known, shard = broker.known, await broker.shards.home(tenant)
    if model in known.declared:
        await broker.request_worker(shard, model)
    if (failure := await known.failure_in(shard, model)) is not None:
        return model_failed(model, failure)
    if model in known.declared:
        start = await known.expected_in(shard, model)
        return NotAnnounced(model, None if start is None else start.ready_in_s)
    return no_such_model(model, {*await known.models(), *known.declared})


def _lane_of(endpoint: Endpoint, body: CallBody | ResponseBody) -> str:
    """The lane of a call that does not name one."""
    default = _PREFILL_LANE if endpoint in VECTOR_ENDPOINTS else _DEFAULT_LANE
    return _LANE_OF_TIER.get(body.service_tier or "", default)


def check_endpoint(card: ModelCard, endpoint: Endpoint) -> None:
    """Raises ApiError if the model does not answer calls of the endpoint."""
    if endpoint not in card.endpoints:
        answered = ", ".join(card.endpoints)
        message = f"the model {card.name!r} does not answer {endpoint}: it answers {answered}"
        raise bad_request("unsupported_endpoint", message, "model")


def check_goes_on(body: CallFields) -> None:
    """Raises ApiError if a job, which has no caller to disconnect, is to be cancelled on
    disconnect."""
    if body.on_disconnect == "cancel":
        message = "on_disconnect: nobody waits for a job, so nobody's leaving can cancel it"
        raise invalid_value("on_disconnect", message)


def check_lane(card: ModelCard, lane: str) -> None:
    """Raises ApiError if the model's workers do not serve the lane."""
    if lane not in card.lanes:
        message = f"lane {lane!r} is none of {', '.join(card.lanes)}"
        raise bad_request("unknown_lane", message, "lane")


async def check_is_lane(gateway: Gateway, lane: str) -> None:
    """Raises ApiError if no model has such a lane."""
    cards = await gateway.broker.known.models()
    lanes = {*DEFAULT_LANES, *(name for card in cards.values() for name in card.lanes)}
    if lane not in lanes:
        raise invalid_value("lane", f"lane must be one of {', '.join(sorted(lanes))}")
