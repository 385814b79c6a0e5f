"""Bytes of a request to a JSON object, strictly: what parsers could read differently is refused.

FastAPI reads every body through `StrictRequest`; models of pydantic check what it returns.
"""

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway.http.errors import ApiError, bad_request

MAX_DEPTH = 32

# Also matches an unterminated string; scanning again would be quadratic.
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """JSON that we do not take; the message is ours, without any of the body."""


class StrictRequest(Request):
    """A request whose body must be one JSON object. FastAPI calls `body` and `json` for endpoints
    with a body, before any dependency; `refuse_malformed` then raises what is wrong with it.
    """

    fields: dict[str, Any] | None = None  # the parsed body
    refusal: ApiError | None = None

    async def body(self) -> bytes:
        """Raises ApiError where the caller leaves."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # Also keeps other sites' pages from posting here without a CORS preflight.
            message = "the content-type must be application/json"
            self.refusal = ApiError(415, "unsupported_media_type", message)
            return b""
        try:
            return await super().body()
        except ClientDisconnect:
            raise ApiError(499, "client_closed_request", "the caller has left") from None

    async def json(self) -> dict[str, Any]:
        if self.fields is None:
            raw = await self.body()
            try:
                self.fields = parse_object(raw)
            except ApiError as error:
                self.refusal, self.fields = error, {}
        return self.fields


async def refuse_malformed(request: Request) -> None:
    """Raises ApiError."""
    if isinstance(request, StrictRequest) and request.refusal is not None:
        raise request.refusal


# An argument behind the caller's: who may not call is refused first.
WellFormed = Annotated[None, Depends(refuse_malformed)]


class StrictRoute(APIRoute):
    """A route whose endpoint and dependencies get a StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        if _depth(raw) > MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels")
        value = _DECODER.decode(raw.decode("utf-8"))
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _Refused as exc:
        raise bad_request("invalid_json", f"the body is not valid: {exc}") from None
    except UnicodeError:
        raise bad_request("invalid_json", "the body is not valid UTF-8 text") from None
    except json.JSONDecodeError as exc:
        message = f"the body is not valid JSON (line {exc.lineno}, column {exc.colno})"
        raise bad_request("invalid_json", message) from None
    except (ValueError, RecursionError):
        raise bad_request("invalid_json", "the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise bad_request("invalid_json", "the body must be a JSON object")
    return value


def _depth(raw: bytes) -> int:
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _no_constant(_: str) -> float:
    raise _Refused("NaN and Infinity are no JSON numbers")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused("a number is out of range")
    return number


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _Refused("a key appears twice in one object")
    return result


_DECODER = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_duplicates
)
