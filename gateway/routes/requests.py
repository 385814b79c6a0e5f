"""Requests whose bodies are read strictly, once the caller may be answered.

FastAPI reads each body through `StrictRequest`; pydantic models validate the result. Forms with a
file are read by `form_of`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from contract.errors import BatchwayError
from gateway.http.bodies import parse_object
from gateway.http.errors import ApiError
from gateway.prepare.admission import Caller, count_call
from gateway.turns import Busy, Owner, Turns

_SHORT_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 1_024  # of a form's field that is no file


class StrictRequest(Request):
    """A request whose body must be one JSON object.

    FastAPI reads the body of an endpoint before it runs any dependency. Errors are kept, and
    `refuse_malformed` raises them after the caller has been authenticated.
    """

    fields: dict[str, Any] | None = None  # the parsed body
    refusal: BatchwayError | None = None
    awaits_count = False  # the body is read once the call counts against the caller's limit

    async def body(self) -> bytes:
        """Raises ApiError if the client disconnects."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # This also blocks cross-site posts without a CORS preflight.
            message = "the content-type must be application/json"
            self.refusal = ApiError(415, "unsupported_media_type", message)
            return b""
        if self.awaits_count:
            self.awaits_count = False
            try:
                await count_call(self)
            except BatchwayError as error:
                self.refusal = error
        length = self.headers.get("content-length", "")
        try:
            if hasattr(self, "_body") or (length.isdigit() and int(length) <= _SHORT_BYTES):
                return await super().body()
            return await self._long_body()
        except Busy as error:
            self.refusal = error
            return b""
        except ClientDisconnect:
            raise ApiError(499, "client_closed_request", "the caller has left") from None

    async def _long_body(self) -> bytes:
        """Reads a long body at the caller's turn; nothing if the call is refused."""
        if self.refusal is not None:
            return b""
        caller: Caller | None = getattr(self.state, "caller", None)
        uploads: Turns = self.app.state.gateway.uploads
        async with uploads.turn(caller.owner if caller is not None else Owner()):
            return await super().body()

    async def json(self) -> dict[str, Any]:
        if self.fields is None:
            raw, self.fields = await self.body(), {}
            try:
                if self.refusal is None:
                    self.fields = parse_object(raw)
            except ApiError as error:
                self.refusal = error
        return self.fields


async def refuse_malformed(request: Request) -> None:
    """Raises ApiError if the body is not a valid JSON object."""
    if isinstance(request, StrictRequest) and request.refusal is not None:
        raise request.refusal


# Place this after the caller's argument, so that authentication errors come first.
WellFormed = Annotated[None, Depends(refuse_malformed)]


class StrictRoute(APIRoute):
    """A route that passes a StrictRequest to its endpoint and dependencies."""

    counts_calls = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            strict_request = StrictRequest(request.scope, request.receive)
            strict_request.awaits_count = self.counts_calls and request.method == "POST"
            return await handle(strict_request)

        return strict


class CallRoute(StrictRoute):
    """A StrictRoute of calls, each of which counts against its caller's limit of requests."""

    counts_calls = True


def check_is_form(request: Request) -> None:
    """Raises ApiError (415)."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        message = "the content-type must be multipart/form-data"
        raise ApiError(415, "unsupported_media_type", message)


@contextlib.asynccontextmanager
async def form_of(request: Request, max_fields: int) -> AsyncIterator[FormData]:
    """A form with one file. Raises ApiError if the client disconnects."""
    limits = {"max_files": 1, "max_fields": max_fields, "max_part_size": _MAX_FIELD_BYTES}
    try:
        async with request.form(**limits) as form:
            yield form
    except ClientDisconnect:
        raise ApiError(499, "client_closed_request", "the caller has left") from None
