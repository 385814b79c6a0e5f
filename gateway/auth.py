"""Who calls: the API key, and the tenant it stands for (one for now)."""

import hmac
from typing import Annotated

from fastapi import Depends, Request

from gateway.errors import ApiError
from gateway.settings import GatewaySettings

DEFAULT_TENANT = "default"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


async def require_tenant(request: Request) -> str:
    """The caller's tenant. Raises ApiError (401) where a key is set and not brought."""
    settings: GatewaySettings = request.app.state.settings
    if settings.api_key is None:
        return DEFAULT_TENANT
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), settings.api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ApiError(
            401,
            "invalid_api_key",
            "this gateway wants `Authorization: Bearer` with its API key",
            headers={"www-authenticate": 'Bearer realm="batchway"'},
        )
    return DEFAULT_TENANT


Tenant = Annotated[str, Depends(require_tenant)]


def hosts_of(settings: GatewaySettings) -> tuple[str, ...]:
    """The Host names a gateway answers to: without a key loopback only, unless told otherwise."""
    if settings.allowed_hosts:
        return settings.allowed_hosts
    return LOOPBACK_HOSTS if settings.api_key is None else ("*",)
