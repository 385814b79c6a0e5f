"""Which pages may ask for changes. A page of another site can make a browser send a request, with
its cookies, but it cannot add a header that holds a key unless CORS permits it. Checks no key."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError
from gateway.http.limits import header
from gateway.settings import GatewaySettings, origin_of, variable

_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES = frozenset(("same-origin", "none"))  # none: the user asked, no page


class OriginGuard:
    """ASGI middleware: refuses a change without a key in a header if a page of an origin that is
    not allowed asks for it. Gives the request the scheme that a trusted proxy names."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._allowed = frozenset(settings.allowed_origins)
        self._proxies = settings.known_proxies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            own = self._own_origin(scope)
            is_open = scope["method"] in _READING or _has_key(scope)
            if not is_open and self._is_foreign(scope, own):
                await _refusal().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _own_origin(self, scope: Scope) -> str | None:
        """The origin under which the client knows this gateway; None if its Host is malformed."""
        host = _only(scope, b"host")
        address, _ = scope.get("client") or ("", 0)
        if self._proxies.covers_host(address.removeprefix("::ffff:")):  # IPv4 to an IPv6 socket
            scheme = _only(scope, b"x-forwarded-proto").lower()
            if scheme in ("http", "https"):
                scope["scheme"] = scheme
            host = _only(scope, b"x-forwarded-host") or host
        return origin_of(f"{scope.get('scheme', 'http')}://{host}")

    def _is_foreign(self, scope: Scope, own: str | None) -> bool:
        """Whether a page of an origin that is not allowed sent this. Only browsers send the two
        headers; no page can change them."""
        if "*" in self._allowed and header(scope, b"cookie") is None:
            return False
        origins = [origin_of(value) for value in _values(scope, b"origin")]
        if len(origins) == 1 and origins[0] in self._allowed:
            return False
        is_own = not origins or (len(origins) == 1 and origins[0] == own is not None)
        return not (is_own and _OWN_SITES.issuperset(_values(scope, b"sec-fetch-site")))


def _has_key(scope: Scope) -> bool:
    """Whether a header holds an API key. Browsers add `Authorization: Basic` by themselves."""
    scheme, _, bearer = (header(scope, b"authorization") or b"").partition(b" ")
    is_bearer = scheme.lower() == b"bearer" and bearer.strip()
    return bool(is_bearer or (header(scope, b"x-api-key") or b"").strip())


def _values(scope: Scope, name: bytes) -> list[str]:
    """The values of all headers with this lower-case name."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _only(scope: Scope, name: bytes) -> str:
    """The value of the only header with this name; '' if there is not exactly one."""
    values = _values(scope, name)
    return values[0] if len(values) == 1 else ""


def _refusal() -> ApiError:
    message = (
        "a page of another origin asks for a change without an API key in a header: "
        f"{variable('allowed_origins')} names the origins that may; behind a proxy, see "
        f"{variable('trusted_proxies')}"
    )
    return ApiError(403, "foreign_origin", message)
