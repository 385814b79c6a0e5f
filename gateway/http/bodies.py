"""Parses JSON bodies strictly: rejects whatever other parsers might read differently."""

import json
import math
import re
from typing import Any

from gateway.http.errors import bad_request

MAX_DEPTH = 32

# Also matches an unterminated string; scanning again would be quadratic.
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """JSON that is rejected. The message contains nothing of the body."""


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError if `raw` is not a valid JSON object."""
    try:
        value = parse_json(raw)
    except _Refused as exc:
        raise bad_request("invalid_json", f"the body is not valid: {exc}") from None
    except UnicodeError:
        raise bad_request("invalid_json", "the body is not valid UTF-8 text") from None
    except json.JSONDecodeError as exc:
        message = f"the body is not valid JSON (line {exc.lineno}, column {exc.colno})"
        raise bad_request("invalid_json", message) from None
    except ValueError:
        raise bad_request("invalid_json", "the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise bad_request("invalid_json", "the body must be a JSON object")
    return value


def parse_json(raw: bytes) -> Any:
    """Parses a body, or a string in a body. Raises ValueError."""
    if depth_of(raw) > MAX_DEPTH:
        raise _Refused(f"nested deeper than {MAX_DEPTH} levels")
    value = _DECODER.decode(raw.decode("utf-8"))
    if _SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def depth_of(raw: bytes) -> int:
    """How deep arrays and objects are nested in JSON."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def no_constant(_: str) -> float:
    raise _Refused("NaN and Infinity are no JSON numbers")


def finite(text: str) -> float:
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
    parse_constant=no_constant, parse_float=finite, object_pairs_hook=_no_duplicates
)
