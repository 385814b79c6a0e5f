"""Ends open calls whose API key, or what stands for it, is no longer valid. Knows neither routes
nor jobs.

For the app it is as if the caller had disconnected, so a job is cancelled or goes on by the same
rules. The caller gets the error of an invalid key.
"""

import asyncio

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.connection import end_tasks
from contract.errors import BatchwayError
from gateway.http import sse
from gateway.http.errors import ApiError
from gateway.redis.key_ring import REMEMBERED_S, KeyRing

KEY = "key_in_redis"  # in the request's state


def watch_key(request: Request, key: str) -> None:
    """Registers the key that admitted the request: when it is no longer valid, the request ends."""
    setattr(request.state, KEY, key)


class RevocationGuard:
    """ASGI middleware. Ends calls that wait for their answer, and streams of events."""

    def __init__(self, app: ASGIApp, key_ring: KeyRing) -> None:
        self._app = app
        self._key_ring = key_ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send, self._key_ring)
        await self._app(scope, call.receive, call.send)
        if call.is_ended:
            await call.tell()


class _Call:
    """One request and its answer. `is_ended`: the app was told that the caller had disconnected,
    and nothing is sent after that."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, key_ring: KeyRing) -> None:
        self.is_ended = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._key_ring = key_ring
        self._has_body = False
        self._has_begun = False
        self._is_stream = False
        self._is_complete = False

    async def receive(self) -> Message:
        if self._has_body:
            return await self._disconnect()
        message = await self._receive()
        self._has_body = not message.get("more_body", False)
        return message

    async def _disconnect(self) -> Message:
        waiting = asyncio.ensure_future(self._receive())
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=REMEMBERED_S)
                if not waiting.done() and await self._must_end():
                    self.is_ended = True
                    return {"type": "http.disconnect"}
            return waiting.result()
        finally:
            await end_tasks(waiting)

    async def _must_end(self) -> bool:
        key = self._scope.get("state", {}).get(KEY)
        if key is None or self._is_complete or (self._has_begun and not self._is_stream):
            return False
        try:
            return await self._key_ring.terms_of(key, is_streaming=self._has_begun) is None
        except BatchwayError:  # nobody knows: calls that come now are refused
            return False

    async def send(self, message: Message) -> None:
        if self.is_ended:
            return
        if message["type"] == "http.response.start":
            self._has_begun = True
            self._is_stream = sse.STREAM_HEADER in message["headers"]
        else:
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def tell(self) -> None:
        """Ends the answer."""
        error = ApiError(401, "invalid_api_key", "the API key or token was revoked or has expired")
        if not self._has_begun:
            await error.response(self._scope)(self._scope, self._receive, self._send)
        elif not self._is_complete:
            body = sse.failure(error, self._scope)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
