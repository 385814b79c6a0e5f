"""Reads the tool calls in an output: where they begin, one behind another, and where they end.

The text between the marks of a call has one of several syntaxes; each has a reader.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import regex

from contract.output_formats import ToolFormat
from workers.output.growing_text import (
    NAME,
    GrowingText,
    Reading,
    compiled,
    is_mark,
    loose,
    pieces_of,
)
from workers.output.literals import (
    GEMMA,
    as_object,
    dumped,
    escaped,
    parsed,
    read_json,
    read_literal,
    read_string,
    value_of,
)
from workers.output.message import MessageBuilder


class CallReader(ABC):
    """Reads the text between the marks of a call."""

    head: str  # a pattern of its beginning; by the format, unless the class has one

    def __init__(
        self,
        format_: ToolFormat,
        tools: "_Tools",
        text: GrowingText,
        message: MessageBuilder,
        alternatives: "Alternatives",
    ) -> None:
        self._text, self._message, self._tools = text, message, tools
        self._alternatives = alternatives
        self._is_bare = format_.is_bare
        self._prepare(format_)
        self._head = compiled(self.head)

    def _prepare(self, format_: ToolFormat) -> None:  # noqa: B027 - most need no more
        """Sets attributes that depend on the format."""

    @abstractmethod
    def read(self) -> Reading[bool]:
        """Reads a call. False: there is none; the text is marked, unless a part was a call."""

    def _is_offered(self, name: str) -> bool:
        """Whether a call may have this name, the only sign of a call in a format without marks."""
        return not self._is_bare or name in self._tools


_ARGUMENTS = compiled(r'\s*(?:(?P<object>(?=\{))|(?P<string>")|(?P<grows>null(?!\w)))')
_FIRST_KEY = compiled(r'\s*(?:(?P<key>")|(?P<end>\}))')
_NEXT_KEY = compiled(r'\s*(?:,\s*(?P<key>")|(?P<end>\}))')
_AFTER_KEY = compiled(r"\s*:")
_QUOTE = compiled(r'\s*"')

Read = Literal["whole", "cut", "none"]


def read_arguments(text: GrowingText, message: MessageBuilder, name: str) -> Reading[Read]:
    """Reads a value as a call's arguments, which are an object, null, or a string that spells an
    object. Returns "cut" if the call has begun, but its arguments are broken or cut by the end."""
    value = yield from text.match(_ARGUMENTS)
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
        self._arguments_keys = {format_.arguments_key, "arguments", "parameters", "args"}

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
        return key if key and (yield from self._text.match(_AFTER_KEY)) is not None else ""

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


_CALL = compiled(rf"\s*{NAME}\s*\(")
_CALL_END = compiled(r"\s*\)")
_PYTHON_KEY = compiled(r"\s*(?P<key>\w+)\s*=(?!=)\s*")
_NEXT_CALL = compiled(r"\s*,")
_LIST_END = compiled(r"\s*\]")


class PythonCalls(CallReader):
    """Reads [NAME(key=value, …), …]"""

    head = r"\s*\["

    def read(self) -> Reading[bool]:
        """Reads the whole list. Returns False if it is none, or its last call is none."""
        if (yield from self._text.match(self._head)) is None:
            return False
        while (yield from self._read_call()):
            self._text.mark()
            if (yield from self._text.match(_NEXT_CALL)) is None:
                self._text.since_mark()
                yield from self._text.match(_LIST_END)
                return True
        return False

    def _read_call(self) -> Reading[bool]:
        call = yield from self._text.match(_CALL)
        if call is None or not self._is_offered(call["name"]):
            return False
        if (yield from self._text.match(_CALL_END)) is not None:
            self._text.since_mark()
            self._message.call(call["name"], "{}")
            return True
        is_first, end = True, ","
        while end == ",":
            if not self._text.is_marked:
                self._text.mark()
            key = yield from self._text.match(_PYTHON_KEY)
            if key is None:  # perhaps after a last comma
                if not is_first and (yield from self._text.match(_CALL_END)) is not None:
                    break
                return False
            value, end = yield from read_literal(self._text)
            if value is None:
                return False
            self._text.since_mark()
            if is_first:
                self._message.call(call["name"], "{")
            self._message.argue(f"{'' if is_first else ', '}{dumped(key['key'])}: {value}")
            is_first = False
        if end:
            self._message.argue("}")
        return True


class GemmaCall(CallReader):
    """Reads NAME{key:value,…}"""

    head = rf"\s*{NAME}\s*(?=\{{)"

    def read(self) -> Reading[bool]:
        head = yield from self._text.match(self._head)
        if head is None:
            return False
        self._text.since_mark()
        self._message.call(head["name"], "")
        yield from read_json(self._text, self._message.argue, GEMMA)
        return True


_CDATA = compiled(r"<!\[CDATA\[")
_CDATA_END = compiled(r"\]\]>")


_TYPES = {"integer": int, "number": int | float, "array": list, "object": dict}


@dataclass(slots=True)
class _Value:
    """An argument: a string is passed on as it comes, any other value once it is whole.
    `alternatives`: what a string may be instead."""

    message: MessageBuilder
    key: str
    is_string: bool
    alternatives: Collection[str] = ()
    text: str = ""
    is_open: bool = False  # a string has begun

    def begin(self) -> None:
        self.message.argue(f"{dumped(self.key)}: ")
        self.add("")

    def add(self, text: str) -> None:
        if self.is_open:
            self.message.argue(escaped(text))
            return
        self.text += text
        if self.is_string and not self._may_differ:
            self.message.argue(f'"{escaped(self.text)}')
            self.is_open = True

    def end(self) -> None:
        self.message.argue('"' if self.is_open else dumped(self._value()))

    def cut(self) -> None:
        """Ends the value, in which the text has ended."""
        if not self.is_open:
            value = self._value()
            self.message.argue(f'"{escaped(value)}' if isinstance(value, str) else dumped(value))

    @property
    def _may_differ(self) -> bool:
        return any(each in _TYPES or each.startswith(self.text) for each in self.alternatives)

    def _value(self) -> Any:
        if not self.is_string:
            return value_of(self.text)
        try:
            value = parsed(self.text)
        except ValueError:
            return self.text
        types = [_TYPES[each] for each in self.alternatives if each in _TYPES]
        is_other = not isinstance(value, bool) and any(isinstance(value, each) for each in types)
        return value if is_other or self.text in self.alternatives else self.text


class TagCall(CallReader):
    """Reads NAME middle (key_open KEY key_close VALUE value_close)*. A value without its closing
    mark ends before the next key, or with the call."""

    def _prepare(self, format_: ToolFormat) -> None:
        self._has_cdata = format_.has_cdata
        self._outer = _outer(format_)
        key_open, key_close = loose(format_.key_open), loose(format_.key_close)
        space = format_.key_close[len(format_.key_close.rstrip()) :]
        key = rf"{key_open}\s*(?P<key>[^<>\n]{{1,256}}?)\s*{key_close}"
        self._key = compiled(rf"\s*{key}(?P<grows>{_or_none(space)})")
        closing = pieces_of(format_.close)
        ending = pieces_of(format_.end)
        follows = "|".join([key_open, *closing, *ending])
        self.head = rf"\s*{NAME}\s*{loose(format_.middle)}\s*(?={follows})"
        self._closing = [
            *(compiled(rf"\s*{piece}") for piece in closing),
            *(compiled(rf"\s*(?={piece})") for piece in ending),
        ]
        close = format_.value_close
        before, after = close[: -len(close.lstrip())], close[len(close.rstrip()) :]
        end = rf"{_or_none(before)}{loose(close)}\s*"
        space = _or_none(before) + _or_none(after)
        next_key = rf"{regex.escape(before) or space}(?={key})"
        call_end = rf"(?P<call_end>{space}(?={'|'.join((*closing, *ending))}))"
        unclosed = _unnamed(rf"{next_key}|{call_end}")
        self._value_end = compiled(rf"{end}(?={follows})|{unclosed}")
        self._last_value_end = compiled(rf"{end}(?:(?={follows})|\Z)|{unclosed}")
        start = _unnamed(rf"(?P<next_call>{_opening(format_)}(?={self.head}))")
        self._late_end = compiled(rf"{end}(?={follows})|{start}")
        self._last_late_end = compiled(rf"{end}(?:(?={follows})|\Z)|{start}")

    def read(self) -> Reading[bool]:
        head = yield from self._text.match(self._head)
        if head is None:
            return False
        if self._outer not in self._text.marked and head["name"] not in self._tools:
            return False
        self._text.since_mark()
        self._message.call(head["name"], "{")
        is_first = True
        while (key := (yield from self._text.match(self._key))) is not None:
            if not is_first:
                self._message.argue(", ")
            is_first = False
            if not (yield from self._read_value(self._new_value(head["name"], key))):
                return True
        is_closed = False
        for piece in self._closing:
            is_closed = (yield from self._text.match(piece)) is not None or is_closed
        if is_closed or self._text.is_read:
            self._message.argue("}")
        return True

    def _new_value(self, function: str, match: "regex.Match[str]") -> _Value:
        """A value is a string as its mark says, or as the schema of the function does."""
        key, type_ = match["key"], match.groupdict().get("type")
        if type_ is not None:
            return _Value(self._message, key, type_ in ("string", "true"))
        alternatives = self._alternatives.get(function, {}).get(key, ())
        return _Value(self._message, key, key in self._tools.get(function, ()), alternatives)

    def _read_value(self, value: _Value) -> Reading[bool]:
        """Reads a value. Returns False if the text ends within it."""
        value.begin()
        if self._has_cdata and (yield from self._text.match(_CDATA)) is not None:
            yield from self._text.until(_CDATA_END, value.add)
        end = yield from self._text.until(self._value_end, value.add, self._last_value_end)
        if end is None:
            value.cut()
            return False
        if end["call_end"] is not None:
            yield from self._read_late_end(value, len(end.group()))
        value.end()
        return True

    def _read_late_end(self, value: _Value, num_back: int) -> Reading[None]:
        """Behind a call's closing mark, which is part of the value if the value ends later."""
        self._text.mark(num_back)
        late = yield from self._text.until(self._late_end, lambda _: None, self._last_late_end)
        if late is None or late["next_call"] is not None:
            self._text.rewind()
        else:
            value.add(self._text.since_mark().removesuffix(late.group()))


def _unnamed(pattern: str) -> str:
    """The pattern without the groups of keys and names."""
    return regex.sub(r"\?P<(?:key|type|name)>", "?:", pattern)


def _outer(format_: ToolFormat) -> str:
    """The first of two opening marks. Models omit it; then only a function that was offered can be
    called."""
    outer, _, inner = format_.open.rpartition("\n")
    return outer if inner else ""


def _opening(format_: ToolFormat) -> str:
    outer = _outer(format_)
    rest = loose(format_.open.removeprefix(outer))
    return rf"(?:{loose(outer)}\s*)?{rest}" if outer else rest


def _or_none(space: str) -> str:
    return f"(?:{regex.escape(space)})?" if space else ""


_Tools = Mapping[str, tuple[str, ...]]
Alternatives = Mapping[str, Mapping[str, tuple[str, ...]]]
_SYNTAXES: dict[str, type[CallReader]] = {
    "object": ObjectCall,
    "json": JsonCall,
    "tags": TagCall,
    "python": PythonCalls,
    "gemma": GemmaCall,
}
_NOTHING = "\0"  # in no text
_PYTHON_TAG = r"(?:<\|python_tag\|>)?"  # of Llama: before calls, at will


class CallsParser:
    """Reads calls into a message. `start` is a pattern of the beginning of the first; in a format
    without marks it counts only at the beginning of the answer."""

    def __init__(
        self,
        format_: ToolFormat,
        tools: _Tools,
        text: GrowingText,
        message: MessageBuilder,
        alternatives: Alternatives | None = None,
    ) -> None:
        self._text, self._message = text, message
        reader = _SYNTAXES[format_.syntax]
        self._call = reader(format_, tools, text, message, alternatives or {})
        self.is_bare = format_.is_bare
        self.last_mark = [_NOTHING, *(format_.end or format_.close).split()][-1]
        head = _unnamed(self._call.head)
        begin, opening = _loose_begin(format_.begin), _opening(format_)
        first = r"\s*".join(filter(None, (begin, opening)))
        if is_mark(format_.open) and begin:
            first = rf"(?:{begin}\s*)?{opening}"
        elif self.is_bare:
            first = rf"{_PYTHON_TAG}\s*{first}"
        self.start = rf"{first}(?={head})"
        self._start = compiled(rf"\s*(?:;\s*)?{self.start}")
        between = "" if is_mark(format_.open) else loose(format_.between or "")
        separator = "|".join(filter(None, [between, "[,;]"]))
        self._again = None
        if format_.syntax != "python":
            self._again = compiled(rf"\s*(?:{separator})?\s*{opening}(?={head})")
        self._closing = _optional(format_.close) if self._again else []
        self._ending = _optional(format_.end)

    def read(self) -> Reading[None]:
        """Reads calls behind a start; the text is marked before it. Other text is content."""
        while (yield from self._read_group()):
            self._text.mark()
            if (yield from self._text.match(self._start)) is None:
                self._text.since_mark()
                return

    def _read_group(self) -> Reading[bool]:
        """Reads the calls up to the format's end. Returns False if the last of them is none."""
        while (yield from self._call.read()):
            self._message.end_part()
            for piece in self._closing:
                yield from self._text.match(piece)
            self._text.mark()
            if self._again is None or (yield from self._text.match(self._again)) is None:
                self._text.since_mark()
                for piece in self._ending:
                    yield from self._text.match(piece)
                return True
        if self._text.is_marked:
            self._message.say(self._text.since_mark())
        return False


def _loose_begin(literal: str) -> str:
    """A pattern of a call's beginning. Models may omit the bracket behind a mark for one call."""
    mark = literal.rstrip().removesuffix("[")
    if mark == literal.rstrip() or not is_mark(mark):
        return loose(literal)
    return rf"{loose(mark)}\s*(?:\[\s*)?"


def _optional(literal: str) -> list["regex.Pattern[str]"]:
    return [compiled(rf"\s*{piece}") for piece in pieces_of(literal)]
