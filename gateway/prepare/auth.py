"""API keys: who the caller is, and what its key permits."""

import hmac
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes

from contract.api_keys import KeyTerms, Scope, prefix_of
from contract.function_types import TenantLimits
from gateway.http.errors import ApiError
from gateway.http.limits import ConcurrencyCap
from gateway.prepare.revocation import watch_key
from gateway.redis.broker import Broker
from gateway.redis.key_ring import KeyRing
from gateway.settings import GatewaySettings
from gateway.turns import Owner, take_turns, work_for

DEFAULT_TENANT = "default"

_OPERATORS_KEY = "operator"  # never the prefix of a key in Redis
_NO_KEY = ""
_EVERYTHING = KeyTerms(tenant=DEFAULT_TENANT, scopes=(Scope.ADMIN,))


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
    def owner(self) -> Owner:
        """The owner of work that is done for the call before its job is queued."""
        return Owner(self.tenant, self.terms.weight)

    @property
    def limits(self) -> TenantLimits:
        terms = self.terms
        return TenantLimits(
            requests_per_min=terms.requests_per_minute,
            tokens_per_min=terms.tokens_per_minute,
            concurrent_tokens=terms.concurrent_tokens,
            lane_share=terms.lane_share,
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
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


async def count_call(request: Request) -> None:
    """Counts a call against its caller's limit of requests, before its body is read. Raises
    ApiError, JobRefused, BrokerUnavailable."""
    caller = await identify(request, await _BEARER(request))
    request.state.caller = caller
    broker: Broker = request.app.state.gateway.broker
    is_counted = await broker.enter(caller.tenant, caller.limits)
    request.state.caller = msgspec.structs.replace(caller, is_counted=is_counted)


async def identify(request: Request, bearer: Bearer) -> Caller:
    """Returns the caller. Raises ApiError (401) without a valid key where one is required, and
    BrokerUnavailable if the key could only be checked in Redis."""
    known: Caller | None = getattr(request.state, "caller", None)
    if known is not None:
        return known
    settings: GatewaySettings = request.app.state.settings
    ring: KeyRing = request.app.state.key_ring
    given = bearer.credentials.strip() if bearer is not None else ""
    if settings.api_key is not None and hmac.compare_digest(
        given.encode(), settings.api_key.encode()
    ):
        return Caller(_EVERYTHING, _OPERATORS_KEY)
    if given and (terms := await ring.terms_of(given)) is not None:
        watch_key(request, given)
        return Caller(terms, prefix_of(given) or _NO_KEY)
    if not settings.wants_key and not await ring.has_some():
        return Caller(_EVERYTHING, _NO_KEY)
    raise ApiError(
        401,
        "invalid_api_key",
        "this gateway wants `Authorization: Bearer` with an API key of its own",
        headers={"www-authenticate": 'Bearer realm="batchway"'},
    )


async def admit(
    request: Request, scopes: SecurityScopes, caller: Annotated[Caller, Depends(identify)]
) -> AsyncIterator[Caller]:
    """Yields the caller and counts its call until the response is sent. Raises ApiError: 403 if the
    key lacks a scope of the route, 429 if the key has too many calls in progress."""
    for scope in scopes.scopes:
        caller.check_scope(Scope(scope))
    calls: ConcurrencyCap = request.app.state.calls_of_keys
    if not calls.can_enter(caller.key_name):
        message = f"this key has {calls.cap} calls under way, and may have no more at a time"
        headers = {"x-dropped-reason": "tenant_quota"}
        raise ApiError(429, "too_many_calls", message, headers=headers)
    calls.enter(caller.key_name)
    take_turns(request.app.state.gateway.turns)
    work_for(caller.owner)
    try:
        yield caller
    finally:
        calls.leave(caller.key_name)


# Dependencies of endpoints, as types of their arguments.
AnyCaller = Annotated[Caller, Security(admit)]
Inference = Annotated[Caller, Security(admit, scopes=[Scope.INFERENCE])]
JobsReader = Annotated[Caller, Security(admit, scopes=[Scope.JOBS_READ])]
JobsWriter = Annotated[Caller, Security(admit, scopes=[Scope.JOBS_WRITE])]
MetricsReader = Annotated[Caller, Security(admit, scopes=[Scope.METRICS])]
