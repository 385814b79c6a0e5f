"""ASGI layers around the app: request ids, limits of head and body, the last net for errors.

Pure ASGI, so that a disconnect reaches the routes and a stream is passed on unbuffered.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, bad_request, internal_error

MAX_HEADER_BYTES = 16 * 1024
_DISCARD_TIMES = 8  # of the allowed length, at most
_DISCARD_S = 1.0

log = logging.getLogger("batchway.gateway")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Gives every request an id: the caller's `x-request-id` where it is one, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id") or b""
        if not _REQUEST_ID.fullmatch(given):
            given = f"req-{secrets.token_hex(16)}".encode()
        scope.setdefault("state", {})["request_id"] = given.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", given)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class LastNet:
    """Answers 500 to what nothing else caught, and logs its type: a message may hold a prompt."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return  # gone before its request was whole: nobody to answer, and no fault of ours
        except Exception as exc:
            if scope["type"] != "http":
                raise
            request_id = scope.get("state", {}).get("request_id")
            log.error("unexpected %s request_id=%s", _where(exc), request_id)
            if not has_started:
                await internal_error().response()(scope, receive, send)


class BodyLimit:
    """Refuses a body that is too long, by its announced length or as it comes, or too slow."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_bytes:
            if int(length) <= _DISCARD_TIMES * self._max_bytes:
                await self._discard(receive, 0)
            await self._too_long().response()(scope, receive, send)
            return
        num_bytes, is_complete = 0, False
        give_up_at = asyncio.get_running_loop().time() + self._timeout_s

        async def limited_receive() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()  # only a disconnect is left to come
            try:
                async with asyncio.timeout_at(give_up_at):
                    message = await receive()
            except TimeoutError as exc:
                raise self._too_slow() from exc
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                if not is_complete:
                    await self._discard(receive, num_bytes)
                raise self._too_long()
            return message

        await self._app(scope, limited_receive, send)

    async def _discard(self, receive: Receive, num_bytes: int) -> None:
        """Takes in a little more than is allowed: a client that is cut off while it still sends
        never reads its 413.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while num_bytes <= _DISCARD_TIMES * self._max_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _too_long(self) -> ApiError:
        message = f"the body has more than {self._max_bytes} bytes"
        return ApiError(413, "body_too_large", message, headers={"connection": "close"})

    def _too_slow(self) -> ApiError:
        message = f"the body did not arrive within {self._timeout_s:g} s"
        return ApiError(408, "body_too_slow", message, headers={"connection": "close"})


class HeadLimit:
    """Refuses a head that is too long. The server stops one that is still coming at this length,
    and takes in whole what came in one piece.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _head_bytes(scope) <= self._max_bytes:
            await self._app(scope, receive, send)
            return
        message = f"the request line and headers have more than {self._max_bytes} bytes"
        error = ApiError(431, "headers_too_large", message, headers={"connection": "close"})
        await error.response()(scope, receive, send)


class TrustedHosts:
    """Refuses a Host header that is none of ours: a page elsewhere whose name was rebound to
    loopback must not reach a gateway that asks for no key. `*` allows every host.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "*" in self._hosts or self._is_trusted(scope):
            await self._app(scope, receive, send)
            return
        error = bad_request("untrusted_host", "the Host header is not a name of this gateway")
        await error.response()(scope, receive, send)

    def _is_trusted(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1:
            return False
        match = re.fullmatch(
            r"\[([0-9a-f:.]+)\](:\d+)?|([^:\[\]]+)(:\d+)?", hosts[0].decode("latin-1").lower()
        )
        return match is not None and (match[1] or match[3]) in self._hosts


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of a (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def _head_bytes(scope: Scope) -> int:
    """Without what separates the parts."""
    line = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


def _where(exc: BaseException) -> str:
    """Type and place of an error, without its message."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(exc).__name__
    code = trace.tb_frame.f_code
    return f"{type(exc).__name__} in {code.co_name} ({code.co_filename}:{trace.tb_lineno})"
