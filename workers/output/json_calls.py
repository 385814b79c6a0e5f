"""Calls whose arguments are JSON: objects with a name, or a name before the arguments."""

import json
from typing import Literal

from contract.output_formats import ToolFormat
from workers.output.call_reader import CallReader
from workers.output.growing_text import GrowingText, Reading
from workers.output.json_text import as_object, read_json, read_string
from workers.output.message import Message
from workers.output.patterns import NAME, compiled, loose, pieces_of

_VALUE = compiled(r'\s*(?:(?P<object>(?=\{))|(?P<string>")|(?P<grows>null(?!\w)))')
_FIRST_KEY = compiled(r'\s*(?:(?P<key>")|(?P<end>\}))')
_NEXT_KEY = compiled(r'\s*(?:,\s*(?P<key>")|(?P<end>\}))')
_COLON = compiled(r"\s*:")
_QUOTE = compiled(r'\s*"')

Read = Literal["whole", "cut", "none"]


def read_arguments(text: GrowingText, message: Message, name: str) -> Reading[Read]:
    """Reads a value as a call's arguments, which are an object, null, or a string that spells an
    object. Returns "cut" if the call has begun, but its arguments are broken or cut by the end."""
    value = yield from text.match(_VALUE)
    if value is None:
        return "none"
    if value.lastgroup == "object":
        text.since_mark()
        message.call(name, "")
        return "whole" if (yield from read_json(text, message.argue)) else "cut"
    if value.lastgroup == "grows":
        text.since_mark()
        message.call(name, "{}")
        return "whole"
    parts: list[str] = []
    is_whole = yield from read_string(text, parts.append)
    arguments = _unquoted("".join(parts[:-1] if is_whole else parts))
    if is_whole:
        arguments = as_object(arguments) or ""
    if not (arguments.lstrip().startswith("{") and (is_whole or text.has_ended)):
        return "none"
    text.since_mark()
    message.call(name, arguments)
    return "whole" if is_whole else "cut"


def _unquoted(text: str) -> str:
    """Returns the value of a JSON string without its quotes. If it is cut, without a cut escape."""
    for end in (len(text), text.rfind("\\"), text.rfind("\\") - 1):
        try:
            value: str = json.loads(f'"{text[: max(end, 0)]}"')
        except ValueError:
            continue
        return value
    return ""


class JsonCall(CallReader):
    """Reads NAME middle {…}"""

    def _prepare(self, format_: ToolFormat) -> None:
        middle = loose(format_.middle)
        self.head = rf"\s*{NAME}\s*(?:{middle}|(?=\{{))"
        ends = "|".join(pieces_of(format_.close) + pieces_of(format_.end))
        self._nothing = compiled(rf"\s*(?={ends})") if ends else None

    def read(self) -> Reading[bool]:
        head = yield from self._text.match(self._head)
        if head is None:
            return False
        read = yield from read_arguments(self._text, self._message, head["name"])
        if read == "none" and self._nothing is not None:
            if (yield from self._text.match(self._nothing)) is None:
                return False
            self._text.since_mark()
            self._message.call(head["name"], "{}")
            return True
        return read != "none"


class ObjectCall(CallReader):
    """Reads {"name": NAME, "arguments": {…}}, with keys in any order, and others."""

    head = r"\s*\{"

    def _prepare(self, format_: ToolFormat) -> None:
        self._name_key = format_.name_key
        self._arguments_keys = {format_.arguments_key, "arguments", "parameters"}

    def read(self) -> Reading[bool]:
        if (yield from self._text.match(self._head)) is None:
            return False
        name, arguments, has_other = "", "", False
        key = yield from self._text.match(_FIRST_KEY)
        while key is not None and key.lastgroup == "key":
            spelled = yield from self._read_key()
            if spelled == self._name_key and not name:
                name = yield from self._read_name()
                if not name or not self._is_offered(name):
                    return False
            elif spelled in self._arguments_keys and name and not arguments:
                read = yield from read_arguments(self._text, self._message, name)
                if read != "whole":
                    return read == "cut"
                yield from self._read_rest()
                return True
            else:
                value = yield from self._read_value()
                if not spelled or not value:
                    return False
                if spelled in self._arguments_keys:
                    arguments = value
                else:
                    has_other = True
            key = yield from self._text.match(_NEXT_KEY)
        if key is None or not name:
            return False
        return self._give(name, arguments, has_other)

    def _give(self, name: str, arguments: str, has_other: bool) -> bool:
        """Emits a call whose name is behind its arguments, or that has none."""
        given = "{}" if arguments in ("", "null") else as_object(arguments)
        if given is None and arguments.startswith('"'):
            given = as_object(json.loads(arguments))
        is_data = not arguments and has_other and self._is_bare
        if given is None or is_data:
            return False
        self._text.since_mark()
        self._message.call(name, given)
        return True

    def _read_rest(self) -> Reading[None]:
        """Reads the other keys, and the brace."""
        while (key := (yield from self._text.match(_NEXT_KEY))) is not None:
            if key.lastgroup != "key" or not (yield from self._read_key()):
                return
            if not (yield from self._read_value()):
                return

    def _read_key(self) -> Reading[str]:
        """Reads a key behind its quote, with the colon; "" if there is none."""
        key = yield from self._read_quoted()
        return key if key and (yield from self._text.match(_COLON)) is not None else ""

    def _read_name(self) -> Reading[str]:
        if (yield from self._text.match(_QUOTE)) is None:
            return ""
        return (yield from self._read_quoted())

    def _read_quoted(self) -> Reading[str]:
        parts: list[str] = []
        is_whole = yield from read_string(self._text, parts.append)
        return json.loads('"' + "".join(parts)) if is_whole else ""

    def _read_value(self) -> Reading[str]:
        parts: list[str] = []
        return "".join(parts) if (yield from read_json(self._text, parts.append)) else ""
