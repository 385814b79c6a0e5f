"""What a request's head may be, checked before routing: its length, its Host, and which page asks
for a change. A page of another site can make a browser send a request, with its cookies, but it
cannot add a header that holds a key unless CORS permits it. Checks no key."""

import re
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError, bad_request
from gateway.settings import GatewaySettings, origin_of, proxies_of, variable

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/.*|)", re.IGNORECASE | re.DOTALL)

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_HEADER_BYTES = 16 * 1024
_UPLOAD = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")

_HOST = re.compile(r"\[([0-9a-f:.]+)\](:\d+)?|([^:\[\]]+)(:\d+)?")
_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES = frozenset(("same-origin", "none"))  # none: the user asked, no page
_MESSAGE = (
    "a page of another origin asks for a change without an API key in a header: "
    f"{variable('allowed_origins')} names the origins that may; behind a proxy, see "
    f"{variable('trusted_proxies')}"
)


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


class HeadGuard:
    """ASGI middleware: refuses a head that may not be, and a change without a key in a header if a
    page of an origin that is not allowed asks for it. Gives the request the scheme that a trusted
    proxy names."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        # `*` allows every host.
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts_of(settings))
        self._allowed = frozenset(settings.allowed_origins)
        self._proxies = proxies_of(settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError. uvicorn stops at this length while a head arrives in parts; a head in
        one packet can be longer."""
        if _num_head_bytes(scope) > MAX_HEADER_BYTES:
            message = f"the request line and headers have more than {MAX_HEADER_BYTES} bytes"
            raise ApiError(431, "headers_too_large", message, headers={"connection": "close"})
        # DNS rebinding: another site's page must not reach a loopback gateway that needs no key.
        if "*" not in self._hosts and _host(scope) not in self._hosts:
            message = "the Host header is not a name of this gateway"
            raise bad_request("untrusted_host", message)
        headers = Headers(scope=scope)
        own = self._own_origin(scope, headers)
        is_open = scope["method"] in _READING or _has_key(headers)
        if not is_open and self._is_foreign(headers, own):
            raise ApiError(403, "foreign_origin", _MESSAGE)

    def _own_origin(self, scope: Scope, headers: Headers) -> str | None:
        """The origin under which the client knows this gateway; None if its Host is malformed."""
        host = _only(headers, "host")
        address, _ = scope.get("client") or ("", 0)
        if self._proxies.covers_host(address.removeprefix("::ffff:")):  # IPv4 to an IPv6 socket
            scheme = _only(headers, "x-forwarded-proto").lower()
            if scheme in ("http", "https"):
                scope["scheme"] = scheme
            host = _only(headers, "x-forwarded-host") or host
        return origin_of(f"{scope.get('scheme', 'http')}://{host}")

    def _is_foreign(self, headers: Headers, own: str | None) -> bool:
        """Whether a page of an origin that is not allowed sent this. Only browsers send the two
        headers; no page can change them."""
        if "*" in self._allowed and "cookie" not in headers:
            return False
        origins = [origin_of(value) for value in headers.getlist("origin")]
        if len(origins) == 1 and origins[0] in self._allowed:
            return False
        is_own = origins in ([], [own]) and origins != [None]
        return not (is_own and _OWN_SITES.issuperset(headers.getlist("sec-fetch-site")))


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


def _has_key(headers: Headers) -> bool:
    """Whether a header holds an API key. Browsers add `Authorization: Basic` by themselves."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer" and bearer.strip()
    return bool(is_bearer or headers.get("x-api-key", "").strip())


def _only(headers: Headers, name: str) -> str:
    """The value of the only header with this name; '' if there is not exactly one."""
    values = headers.getlist(name)
    return values[0] if len(values) == 1 else ""
