"""Limits of a request, checked before routing: length of the head, Host header, length of the body,
which is decoded here. `connections.RequestGuard` limits the time of a body."""

import re
import zlib
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import ApiError, bad_request
from gateway.settings import GatewaySettings, variable

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/.*|)", re.IGNORECASE | re.DOTALL)

_ACCEPTED = ("gzip", "deflate")
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 31, 15, -15  # zlib's names of its formats
_ZLIB_METHOD = 8  # in the low four bits of its first byte; deflate without zlib cannot begin so

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_HEADER_BYTES = 16 * 1024
_UPLOAD = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")
_FORM_BYTES = 64 * 1024  # of an upload around the file

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


class TooMuch(Exception):
    """The body would have more bytes than are allowed."""


class Decoder:
    """Decodes one body. `encoding`: the header's value; `max_bytes`: of the decoded body.

    It stops decoding at the limit, because a few bytes may stand for gigabytes. Raises ApiError
    (415) for other encodings.
    """

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self._encoding = encoding.strip().lower().removeprefix("x-")
        self._left = max_bytes
        if self._encoding not in ("", "identity", *_ACCEPTED):
            message = f"the content-encoding must be {' or '.join(_ACCEPTED)}, or absent"
            headers = {"accept-encoding": ", ".join(_ACCEPTED)}
            raise ApiError(415, "unsupported_media_type", message, headers=headers)
        self._open = zlib.decompressobj()  # replaced at the first byte
        self._has_begun = False

    def decode(self, data: bytes, *, is_last: bool) -> bytes:
        """The next bytes of the body. Raises TooMuch, and ApiError if it is not so encoded."""
        found = data if self._encoding not in _ACCEPTED else self._decompressed(data, is_last)
        self._left -= len(found)
        if self._left < 0:
            raise TooMuch
        return found

    def _decompressed(self, data: bytes, is_last: bool) -> bytes:
        parts, room = list[bytes](), self._left
        try:
            while data and room >= 0:
                if not self._has_begun or (self._open.eof and self._encoding == "gzip"):
                    self._begin(data[0])  # a gzip file may have several members
                parts.append(self._open.decompress(data, room + 1))
                room -= len(parts[-1])
                if self._open.eof and not self._open.unused_data:
                    break
                if self._encoding == "deflate" and self._open.eof:
                    raise self._malformed()
                data = self._open.unused_data
        except zlib.error:
            raise self._malformed() from None
        if is_last and room >= 0 and not self._open.eof:
            raise self._malformed()
        return b"".join(parts)

    def _begin(self, first: int) -> None:
        bits = _GZIP_BITS
        if self._encoding == "deflate":  # zlib's, by the standard; some clients leave its head out
            bits = _ZLIB_BITS if first & 0x0F == _ZLIB_METHOD else _RAW_BITS
        self._open, self._has_begun = zlib.decompressobj(bits), True

    def _malformed(self) -> ApiError:
        return bad_request("bad_request", f"the body is no whole {self._encoding} data")


class RequestLimits:
    """ASGI middleware. A limit of the body raises in whoever reads it; other limits are answered at
    once."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._bounds = {
            False: (settings.max_body_bytes, variable("max_body_bytes")),
            True: (settings.max_file_bytes + _FORM_BYTES, variable("max_file_bytes")),
        }
        # `*` allows every host.
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts_of(settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_head(scope)
            encoding = header(scope, b"content-encoding") or b""
            body = Body(receive, *self._bounds[is_upload(scope)], encoding.decode("latin-1"))
            body.check_announced(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, body.receive, send)

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


class Body:
    """The body of one request. Raises ApiError (413) if it is too long, by its Content-Length, its
    actual or its decoded bytes. `setting`: the variable that holds `max_bytes`."""

    def __init__(self, receive: Receive, max_bytes: int, setting: str, encoding: str) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._setting = setting
        self._decoder = Decoder(encoding, max_bytes)
        self._num_bytes = 0
        self._is_complete = False

    def check_announced(self, scope: Scope) -> None:
        """Checks the Content-Length, before any byte is read."""
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_bytes:
            raise self._too_long()

    async def receive(self) -> Message:
        """The next ASGI message."""
        if self._is_complete:
            return await self._receive()  # only http.disconnect can follow
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        data = message.get("body", b"")
        self._num_bytes += len(data)
        self._is_complete = not message.get("more_body", False)
        try:
            if self._num_bytes > self._max_bytes:
                raise TooMuch
            return {**message, "body": self._decoder.decode(data, is_last=self._is_complete)}
        except TooMuch:
            raise self._too_long() from None

    def _too_long(self) -> ApiError:
        message = (
            f"the body has more than {self._max_bytes} bytes, the limit that {self._setting} sets"
        )
        return ApiError(413, "body_too_large", message)


def is_upload(scope: Scope) -> bool:
    """Whether the request's body is a file, or a part of one."""
    return scope["method"] == "POST" and _UPLOAD.fullmatch(scope["path"]) is not None


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header with this lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _num_head_bytes(scope: Scope) -> int:
    """The length without separators."""
    num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    for name, value in scope["headers"]:
        num_bytes += len(name) + len(value)
    return num_bytes


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


class ConcurrencyCap:
    """Limits how many things a name may have at a time: connections of an address, calls of a key.

    Counts of one process. `cap` 0 means no limit. Names whose count is 0 are not stored."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._num_of: dict[str, int] = {}

    def enter(self, name: str) -> bool:
        """Counts one more. False if the name has as many as it may."""
        number = self._num_of.get(name, 0)
        if self.cap and number >= self.cap:
            return False
        self._num_of[name] = number + 1
        return True

    def leave(self, name: str) -> None:
        left = self._num_of[name] - 1
        if left:
            self._num_of[name] = left
        else:
            del self._num_of[name]
