"""Limits of a request's head, checked before routing: its length, and the Host header."""

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError, bad_request
from gateway.settings import GatewaySettings

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/.*|)", re.IGNORECASE | re.DOTALL)

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_HEADER_BYTES = 16 * 1024
_UPLOAD = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")

_HOST = re.compile(r"\[([0-9a-f:.]+)\](:\d+)?|([^:\[\]]+)(:\d+)?")


def plain_target(scope: Scope) -> Scope:
    """Returns the request with only the path as its target. If the target names scheme and host, as
    from some proxies, these take precedence over the Host header (RFC 9112, section 3.2.2)."""
    path: str = scope["path"]
    changes: dict[str, object] = {}
    absolute = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if absolute is not None:
        raw = absolute[2] or b"/"
        path = unquote(raw.decode("ascii"))
        headers = [pair for pair in scope["headers"] if pair[0] != b"host"]
        changes = {"raw_path": raw, "headers": [(b"host", absolute[1]), *headers]}
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/") or "/"
    return scope if path == scope["path"] and not changes else {**scope, **changes, "path": path}


class RequestLimits:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        # `*` allows every host.
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts_of(settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_head(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_head(self, scope: Scope) -> None:
        """Raises ApiError if the head is too long or the Host header is not allowed. uvicorn stops
        at this length while a head arrives in parts; a head in one packet can be longer."""
        if _num_head_bytes(scope) > MAX_HEADER_BYTES:
            message = f"the request line and headers have more than {MAX_HEADER_BYTES} bytes"
            raise ApiError(431, "headers_too_large", message, headers={"connection": "close"})
        # DNS rebinding: another site's page must not reach a loopback gateway that needs no key.
        if "*" not in self._hosts and _host(scope) not in self._hosts:
            message = "the Host header is not a name of this gateway"
            raise bad_request("untrusted_host", message)


def is_upload(scope: Scope) -> bool:
    """Whether the request's body is a file, or a part of one."""
    return scope["method"] == "POST" and _UPLOAD.fullmatch(scope["path"]) is not None


def _num_head_bytes(scope: Scope) -> int:
    """The length without separators."""
    num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    return num_bytes + sum(len(name) + len(value) for name, value in scope["headers"])


def _host(scope: Scope) -> str:
    """The name in the only Host header, without its port; '' if there is not exactly one."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    match = _HOST.fullmatch(hosts[0].decode("latin-1").lower()) if len(hosts) == 1 else None
    return (match[1] or match[3]) if match is not None else ""


def hosts_of(settings: GatewaySettings) -> tuple[str, ...]:
    """Allowed Host headers. By default only loopback names, unless every call needs a key."""
    if settings.allowed_hosts:
        return settings.allowed_hosts
    return ("*",) if settings.wants_key else LOOPBACK_HOSTS
