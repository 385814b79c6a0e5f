"""Which pages may ask for changes. A page of another site can make a browser send a request, with
its cookies, but it cannot add a header that holds a key unless CORS permits it. Checks no key."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError
from gateway.settings import GatewaySettings, origin_of, proxies_of, variable

_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES = frozenset(("same-origin", "none"))  # none: the user asked, no page
_MESSAGE = (
    "a page of another origin asks for a change without an API key in a header: "
    f"{variable('allowed_origins')} names the origins that may; behind a proxy, see "
    f"{variable('trusted_proxies')}"
)


class OriginGuard:
    """ASGI middleware: refuses a change without a key in a header if a page of an origin that is
    not allowed asks for it. Gives the request the scheme that a trusted proxy names."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._allowed = frozenset(settings.allowed_origins)
        self._proxies = proxies_of(settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            own = self._own_origin(scope, headers)
            is_open = scope["method"] in _READING or _has_key(headers)
            if not is_open and self._is_foreign(headers, own):
                answer = ApiError(403, "foreign_origin", _MESSAGE).response()
        await answer(scope, receive, send)

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


def _has_key(headers: Headers) -> bool:
    """Whether a header holds an API key. Browsers add `Authorization: Basic` by themselves."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer" and bearer.strip()
    return bool(is_bearer or headers.get("x-api-key", "").strip())


def _only(headers: Headers, name: str) -> str:
    """The value of the only header with this name; '' if there is not exactly one."""
    values = headers.getlist(name)
    return values[0] if len(values) == 1 else ""
