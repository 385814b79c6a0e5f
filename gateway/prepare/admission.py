"""The caller of a call: what its API key permits, what it is counted against, and the terms of its
jobs."""

import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, get_type_hints

import msgspec
from fastapi import Depends, Query, Request, Security, params
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi.security import HTTPAuthorizationCredentials as Authorization

from contract.api_keys import KeyTerms, Scope, is_tenant
from contract.endpoints import VECTOR_ENDPOINTS
from contract.function_types import Submission, TenantLimits
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import new_job_id
from gateway.http.errors import ApiError, UnknownJob, invalid_value
from gateway.prepare.revocation import watch_key
from gateway.prepare.schemas import ChatBody
from gateway.prepare.unsupported import CallFields
from gateway.redis.key_ring import EVERYTHING, KeyRing, csrf_token, job_of, name_of
from gateway.settings import GatewaySettings
from gateway.state import Gateway
from gateway.turns import ConcurrencyCap, Owner, take_turns

SESSION_COOKIE = "batchway_session"
CSRF_HEADER = "x-csrf-token"
_READING = frozenset(("GET", "HEAD"))
ALL_TENANTS = "*"

_LANE_OF_TIER = {"priority": "interactive", "flex": "batch"}
_PREFILL_LANE, _DEFAULT_LANE = "scoring", "standard"

_NO_PARAMS = SamplingParams(max_tokens=0, seed=0)  # of a job without a prompt


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller and its key's terms. `key_name` identifies the key without revealing
    it. `job_id`: the only job that it may know, of a caller with a token."""

    terms: KeyTerms
    key_name: str
    job_id: str = ""
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

    def job(self, endpoint: Endpoint, body: CallFields, lane: str = "", job_id: str = "") -> Job:
        """The caller's job, which has no prompt yet; the lane is by default that of the body's
        service tier. Raises ApiError (403) if the key does not permit the lane, or a template of
        the body's own."""
        lane = lane or _lane_of(endpoint, body)
        self.check_lane(lane)
        self.check_template(body)
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
        self, settings: GatewaySettings, body: object, *, may_become_job: bool, **terms: Any
    ) -> Submission:
        """The terms of a call, or of a job if the caller accepts that the call becomes one: then it
        can also wait for a worker. An answer that is stored is kept as a job's."""
        if may_become_job:
            deadline_s, retention_s = settings.job_deadline_s, self.job_retention_s(settings)
        else:
            deadline_s, retention_s = settings.sync_deadline_s, self.sync_retention_s(settings)
        if isinstance(body, ChatBody) and body.store:
            retention_s = self.job_retention_s(settings)
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

    def check_template(self, body: object) -> None:
        """Raises ApiError (403) if the body has a chat template and the key lacks the scope."""
        if isinstance(body, ChatBody) and body.chat_template is not None:
            self.check_scope(Scope.TEMPLATES)

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
        return Caller(terms, name_of(given), job_of(given))
    if not await ring.wants_key() and not job_of(given):
        return Caller(EVERYTHING, key_name="")
    raise invalid_key()


def invalid_key() -> ApiError:
    return ApiError(
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
    the limit of requests. `takes_token`: that of the job in the path will do."""

    scopes: tuple[str, ...]
    is_counted: bool
    takes_token: bool


def right_of(endpoint: Callable[..., Any]) -> Right | None:
    """What an endpoint asks of its caller, by the annotations of its own arguments and of those of
    its dependencies; None if it takes no caller."""
    for hint in get_type_hints(endpoint, include_extras=True).values():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, params.Security) and each.dependency in _CALLERS:
                scopes, asks = tuple(each.scopes or ()), each.dependency
                return Right(scopes, asks is submitter_of, asks is follower_of)
            if isinstance(each, params.Depends) and each.dependency is not None:
                found = right_of(each.dependency)
                if found is not None:
                    return found
    return None


@contextlib.asynccontextmanager
async def admitted(request: Request, right: Right) -> AsyncIterator[None]:
    """Holds one of the caller's calls. Raises ApiError: 401, 403 if the key lacks a scope, 429 if
    it has too many calls in progress; UnknownJob if its token is for another job, JobRefused if its
    requests of this minute are spent, and BrokerUnavailable."""
    key = await key_of(await _BEARER(request), await _HEADER(request))
    if not key and right.takes_token and job_of(given := request.query_params.get("token", "")):
        key = given
    caller = await identify(request, key)
    if caller.job_id:
        _check_token(request, caller, right)
    for scope in right.scopes:
        caller.check_scope(Scope(scope))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_counted(request.app.state.calls_of_keys, caller.key_name, "key"))
        if caller.job_id:
            stack.enter_context(_counted(request.app.state.calls_of_tokens, caller.job_id, "job"))
        gateway: Gateway = request.app.state.gateway
        if right.is_counted and caller.terms.requests_per_minute:
            await gateway.broker.enter(caller.tenant, caller.limits)
            caller = msgspec.structs.replace(caller, is_counted=True)
        request.state.caller = caller
        owner = Owner(caller.terms.tenant, caller.terms.weight)
        take_turns(gateway.turns, owner, gateway.settings.sync_deadline_s)
        yield


def _check_token(request: Request, caller: Caller, right: Right) -> None:
    """Raises ApiError (403) and UnknownJob, whether the other job exists or not."""
    if not right.takes_token:
        message = "a job's token only reads, follows and cancels that job"
        raise ApiError(403, "missing_scope", message)
    if request.path_params["job_id"] != caller.job_id:
        raise UnknownJob


@contextlib.contextmanager
def _counted(calls: ConcurrencyCap, name: str, whose: str) -> Iterator[None]:
    """Counts a call while it goes on. Raises ApiError (429)."""
    if not calls.enter(name):
        message = f"this {whose} has {calls.cap} calls under way, and may have no more at a time"
        headers = {"x-dropped-reason": "tenant_quota"}
        raise ApiError(429, "too_many_calls", message, headers=headers, retry_after_s=1)
    try:
        yield
    finally:
        calls.leave(name)


async def caller_of(request: Request, _key: Key) -> Caller:
    """The caller, as `admitted` has identified it."""
    caller: Caller = request.state.caller
    return caller


async def submitter_of(request: Request, _key: Key) -> Caller:
    """The caller of a call that submits work."""
    return await caller_of(request, _key)


async def follower_of(
    request: Request,
    _key: Key,
    _token: Annotated[
        str, Query(alias="token", description="the job's token, where no header can hold it")
    ] = "",
) -> Caller:
    """The caller of a call for which the token of the job in the path will do."""
    return await caller_of(request, _key)


_CALLERS = (caller_of, submitter_of, follower_of)

# Dependencies of endpoints, as types of their arguments.
AnyCaller = Annotated[Caller, Security(caller_of)]
Inference = Annotated[Caller, Security(submitter_of, scopes=[Scope.INFERENCE])]
JobsSubmitter = Annotated[Caller, Security(submitter_of, scopes=[Scope.JOBS_WRITE])]
JobsReader = Annotated[Caller, Security(caller_of, scopes=[Scope.JOBS_READ])]
JobsWriter = Annotated[Caller, Security(caller_of, scopes=[Scope.JOBS_WRITE])]
JobFollower = Annotated[Caller, Security(follower_of, scopes=[Scope.JOBS_READ])]
JobCanceller = Annotated[Caller, Security(follower_of, scopes=[Scope.JOBS_WRITE])]
Admin = Annotated[Caller, Security(caller_of, scopes=[Scope.ADMIN])]
MetricsReader = Annotated[Caller, Security(caller_of, scopes=[Scope.METRICS])]


def _lane_of(endpoint: Endpoint, body: CallFields) -> str:
    """The lane of a call that does not name one."""
    default = _PREFILL_LANE if endpoint in VECTOR_ENDPOINTS else _DEFAULT_LANE
    return _LANE_OF_TIER.get(body.service_tier or "", default)
