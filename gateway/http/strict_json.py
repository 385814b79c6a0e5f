"""Parses JSON strictly: rejects whatever other parsers might read differently.

`python -m gateway.http.strict_json` checks the large bodies of callers in a process of its own (see
gateway/child.py), so this imports nothing of a web framework.
"""

import base64
import hashlib
import json
import math
import os
import re
from typing import Any

from gateway.child import Refused, serve

MAX_DEPTH = 32
MAX_VALUES = 2**19  # token ids of which each takes 8 bytes of a body of 4 MiB
MAX_STRINGS = 2**17  # with names, objects and lists: each takes more time and memory than a number

_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonRefused(ValueError):
    """JSON that is rejected. The message contains nothing of the body."""


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises JsonRefused, whose message is for the caller, if `raw` is not a valid JSON object."""
    try:
        value = parse_json(raw)
    except JsonRefused as exc:
        raise JsonRefused(f"the body is not valid: {exc}") from None
    except UnicodeError:
        raise JsonRefused("the body is not valid UTF-8 text") from None
    except json.JSONDecodeError as exc:
        place = f"line {exc.lineno}, column {exc.colno}"
        raise JsonRefused(f"the body is not valid JSON ({place})") from None
    except ValueError:
        raise JsonRefused("the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise JsonRefused("the body must be a JSON object")
    return value


def parse_json(raw: bytes) -> Any:
    """Parses a body, or a string in a body. Raises ValueError."""
    check_shape(raw)
    value = _DECODER.decode(raw.decode("utf-8"))
    if _SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def check_shape(raw: bytes, share: float = 1.0) -> None:
    """Looks at what stands between strings; an unterminated one ends with the text. Raises
    JsonRefused for too many values, for a `share` of the bounds, or too deep ones."""
    pieces = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    plain, num_strings = b"".join(pieces[::2]), len(pieces) // 2
    opened, closed = (sum(map(plain.count, kind)) for kind in ((b"[", b"{"), (b"]", b"}")))
    if plain.count(b",") + max(opened, closed) >= share * MAX_VALUES:
        raise JsonRefused(f"it has more than {MAX_VALUES} values")
    if num_strings + max(opened, closed) > share * MAX_STRINGS:
        raise JsonRefused(f"it has more than {MAX_STRINGS} strings, names, objects and lists")
    depth = deepest = 0
    for bracket in _BRACKET.findall(plain):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise JsonRefused(f"nested deeper than {MAX_DEPTH} levels")


def hash_of(endpoint: str, fields: dict[str, Any]) -> str:
    """A hash that is equal for equal bodies of one endpoint."""
    text = json.dumps([endpoint, fields], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def no_constant(_: str) -> float:
    raise JsonRefused("NaN and Infinity are no JSON numbers")


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonRefused("a number is out of range")
    return number


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise JsonRefused("a key appears twice in one object")
    return result


_DECODER = json.JSONDecoder(
    parse_constant=no_constant, parse_float=finite, object_pairs_hook=_no_duplicates
)


def _checked(request: Any) -> str:
    """The hash of the body with an endpoint, '' without one."""
    try:
        fields = parse_object(base64.b64decode(request["body"]))
    except JsonRefused as refusal:
        raise Refused(str(refusal)) from None
    return hash_of(request["endpoint"], fields) if request["endpoint"] else ""


if __name__ == "__main__":
    os.nice(10)  # others' tokens come before a body that is long
    serve(lambda _: _checked)
