"""The order of each route: identify the caller, count its call, and only then read its body.

FastAPI reads a JSON body through `StrictRequest`, before it runs any dependency; pydantic models
validate the result. Forms with a file are read by `form_of`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.child_process import ChildUnreadable
from gateway.http.bodies import ENCODINGS, SHORT_BYTES, Body
from gateway.http.errors import ApiError, internal_error, to_api_error
from gateway.http.limits import is_upload
from gateway.prepare.admission import Right, admitted, right_of
from gateway.settings import GatewaySettings, variable
from gateway.state import Gateway
from gateway.turns import Busy, end_place, hold, keep_place

_FORM_BYTES = 64 * 1024  # of an upload around the file
_OPEN_BYTES = 1024  # of a body from a caller who is not known
_MAX_FIELD_BYTES = 1_024  # of a form's field that is no file
_FILE_LIMIT = f"the limit that {variable('max_file_bytes')} sets"
_BODY_LIMIT = f"the limit that {variable('max_body_bytes')} sets"


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_OPEN = set[Callable[..., Any]]()


def open_to_all(endpoint: _Endpoint) -> _Endpoint:
    """Marks an endpoint that answers whoever asks. docs/security.md names each."""
    _OPEN.add(endpoint)
    return endpoint


class StrictRequest(Request):
    """A request whose body must be one JSON object.

    It outlives the answer's first bytes and bodies are large, so it keeps no parsed body, and the
    text only if that is compared later, with an Idempotency-Key."""

    _text: bytes | None = None

    async def body(self) -> bytes:
        """A long body waits for the caller's turn, and keeps its place until its job is queued.
        Raises ApiError."""
        if self._text is not None:
            return self._text
        length = self.headers.get("content-length", "")
        if length.strip("0") or {"content-type", "transfer-encoding"} & {*self.headers}:
            check_media_type(self, "application/json")
        gateway: Gateway = self.app.state.gateway
        is_short = length.isdigit() and int(length) <= SHORT_BYTES
        try:
            if not is_short or "content-encoding" in self.headers:
                await keep_place(gateway.uploads)
            text = b"".join([part async for part in self.stream()])
            if text:
                check_media_type(self, "application/json")
            if len(text) <= SHORT_BYTES:  # the places of others bound what they hold
                hold(len(text))
            self._fields = await gateway.bodies.parse(text) if text else {}
        except Busy as error:
            raise to_api_error(error) from None
        except ChildUnreadable:
            raise internal_error() from None
        except ClientDisconnect:
            raise ApiError(499, "client_closed_request", "the caller has left") from None
        self._text = text if "idempotency-key" in self.headers else b""
        return text

    async def json(self) -> dict[str, Any]:
        """The body that `body` has read, once."""
        fields, self._fields = self._fields, {}
        return fields


class GuardedRoute(APIRoute):
    """A route that reads its body and runs its endpoint once the caller is admitted. Raises
    TypeError for an endpoint that takes no caller, itself or by a dependency, and is not open."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.right: Right | None = right_of(endpoint)
        if (self.right is None) != (endpoint in _OPEN):
            raise TypeError(f"{path}: an endpoint takes a caller, or is open to all")
        super().__init__(path, endpoint, **options)
        self._is_upload = is_upload({"method": min(self.methods or ()), "path": path})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        request = Request(scope, receive)
        async with contextlib.AsyncExitStack() as stack:
            if self.right is not None:
                await stack.enter_async_context(admitted(request, self.right))
            stack.push_async_callback(end_place)
            body = Body(scope, receive, *self._bound(scope, request.app.state.settings))
            await super().handle(scope, body.receive, send)

    def _bound(self, scope: Scope, settings: GatewaySettings) -> tuple[int, str, tuple[str, ...]]:
        """The most bytes of a body, what sets them, and how it may be encoded. A file may not: a
        few bytes would stand for gigabytes on a disk."""
        if self.right is None:
            return _OPEN_BYTES, "the most before a caller is known", ()
        if self._is_upload:
            return settings.max_file_bytes + _FORM_BYTES, _FILE_LIMIT, ()
        if self.right.is_counted:
            return settings.max_body_bytes, _BODY_LIMIT, ENCODINGS
        limit = "the most of calls that submit no work"
        return min(SHORT_BYTES, settings.max_body_bytes), limit, ENCODINGS

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def check_media_type(request: Request, wanted: str) -> None:
    """Raises ApiError (415). Also a page of another site can post JSON only after a preflight."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != wanted:
        raise ApiError(415, "unsupported_media_type", f"the content-type must be {wanted}")


def multipart(
    required: Sequence[str], properties: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """What the OpenAPI document says of a route's form, which `form_of` reads."""
    schema = {"type": "object", "required": required, **others, "properties": properties}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


@contextlib.asynccontextmanager
async def form_of(request: Request, max_fields: int) -> AsyncIterator[FormData]:
    """A form with one file. Raises ApiError if the client disconnects."""
    limits = {"max_files": 1, "max_fields": max_fields, "max_part_size": _MAX_FIELD_BYTES}
    try:
        async with request.form(**limits) as form:
            yield form
    except ClientDisconnect:
        raise ApiError(499, "client_closed_request", "the caller has left") from None
