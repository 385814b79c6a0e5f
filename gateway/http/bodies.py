"""Bytes of a request to a JSON object, strictly: what parsers could read differently is refused.

Knows nothing of what the fields mean.
"""

import json
import math
import re
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from gateway.http.errors import ApiError, bad_request

MAX_DEPTH = 32

# Also matches an unterminated string; scanning again would be quadratic.
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """JSON that we do not take; the message is ours, without any of the body."""


async def read_object(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Also what keeps other sites' pages from posting here without a CORS preflight.
        raise ApiError(415, "unsupported_media_type", "the content-type must be application/json")
    return parse_object(await _whole_body(request.receive))


async def _whole_body(receive: Receive) -> bytes:
    """Raises ClientDisconnect."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


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
