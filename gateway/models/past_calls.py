"""Calls of earlier turns, as chat templates expect them.

A model may have written anything as a call's arguments, and its answer may have been cut off. The
conversation continues all the same: templates always get an object, of bounded depth, with nothing
that JSON does not allow.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from gateway.http.strict_json import check_shape, finite, no_constant

Rendered = Mapping[str, Any]  # a message as templates expect it

_SHARE = 1 / 8  # of a body's bounds, for one call's arguments: they are parsed on the loop
UNREADABLE = "arguments"  # the key of arguments that are no object

_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def arguments_object(text: str) -> dict[str, Any]:
    """Parses arguments as an object; what is missing in a cut text is left out. Without arguments,
    or for null, the object is empty; any other value or text becomes its only member."""
    if not text.strip():
        return {}
    value = _value(text)
    if value is None:
        return {}
    return value if isinstance(value, dict) else {UNREADABLE: value}


def fitting_id(call_id: str, length: int) -> str:
    """Converts a call's id to one of `length` letters and digits, for templates that require it; 0:
    any id is accepted. Equal ids stay equal."""
    is_fitting = len(call_id) == length and call_id.isascii() and call_id.isalnum()
    if length == 0 or is_fitting:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


def one_call_each(messages: Sequence[Rendered], *, apart: bool) -> list[Rendered]:
    """Rewrites messages for a template that shows one call per message: each call becomes a
    message, followed by its result, which is shown once. `apart`: content gets a message of its own
    before reasoning and a call."""
    shown: list[Rendered] = []
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls", ())
        if apart and calls and message["content"] and message.get("reasoning_content"):
            shown.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        if len(calls) < 2:
            shown.append(message)
            continue
        results: dict[str, list[Rendered]] = {}
        while waiting and waiting[0]["role"] == "tool":
            results.setdefault(waiting[0]["tool_call_id"], []).append(waiting.popleft())
        for call in calls:
            shown.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": message["content"] and ""}
            shown += results.pop(call["id"], [])
        shown += [each for of_no_call in results.values() for each in of_no_call]
    return shown


def _value(text: str) -> Any:
    """The value of a JSON text, cut off or not; the text itself if it is not JSON, or too large."""
    try:
        check_shape(text.encode(), _SHARE)
    except ValueError:
        return text
    try:
        value = _DECODER.decode(text)
    except ValueError:
        try:
            value = from_json(_escaped(text), allow_partial="trailing-strings", allow_inf_nan=False)
            json.dumps(value, allow_nan=False)  # from_json reads 1e999 as infinity
        except ValueError:
            return text
        if not isinstance(value, dict | list) or not value:
            return text
    if "\\u" in text:  # an escaped half of a surrogate pair is no text
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def _escaped(text: str) -> str:
    """Returns the text with control characters in strings escaped."""
    return _STRING.sub(
        lambda string: _CONTROL.sub(lambda found: json.dumps(found.group())[1:-1], string.group()),
        text,
    )


_DECODER = json.JSONDecoder(strict=False, parse_constant=no_constant, parse_float=finite)
