"""Calls whose arguments are each enclosed in tags. Strings are written without quotes."""

from dataclasses import dataclass

import regex

from contract.output_formats import ToolFormat
from workers.output.call_reader import CallReader
from workers.output.growing_text import Reading
from workers.output.json_text import dumped, escaped
from workers.output.message import Message
from workers.output.patterns import NAME, compiled, loose, pieces_of
from workers.output.python_text import value_of

_CDATA = compiled(r"<!\[CDATA\[")
_CDATA_END = compiled(r"\]\]>")


@dataclass(slots=True)
class _Value:
    """An argument: a string is passed on as it comes, any other value once it is whole."""

    message: Message
    key: str
    is_string: bool
    text: str = ""

    def begin(self) -> None:
        self.message.argue(f"{dumped(self.key)}: ")
        if self.is_string:
            self.message.argue('"')

    def add(self, text: str) -> None:
        if self.is_string:
            self.message.argue(escaped(text))
        else:
            self.text += text

    def end(self) -> None:
        self.message.argue('"' if self.is_string else dumped(value_of(self.text)))

    def cut(self) -> None:
        """Ends the value, in which the text has ended."""
        if not self.is_string:
            value = value_of(self.text)
            self.message.argue(f'"{escaped(value)}' if isinstance(value, str) else dumped(value))


class TagCall(CallReader):
    """Reads NAME middle (key_open KEY key_close VALUE value_close)*"""

    def _prepare(self, format_: ToolFormat) -> None:
        self._has_cdata = format_.has_cdata
        key_open, key_close = loose(format_.key_open), loose(format_.key_close)
        space = format_.key_close[len(format_.key_close.rstrip()) :]
        self._key = compiled(
            rf"\s*{key_open}\s*(?P<key>[^<>\n]{{1,256}}?)\s*{key_close}(?P<grows>{_or_none(space)})"
        )
        closing = pieces_of(format_.close)
        ending = pieces_of(format_.end)
        follows = "|".join([key_open, *closing, *ending])
        self.head = rf"\s*{NAME}\s*{loose(format_.middle)}\s*(?={follows})"
        self._closing = [
            *(compiled(rf"\s*{piece}") for piece in closing),
            *(compiled(rf"\s*(?={piece})") for piece in ending),
        ]
        space = format_.value_close[: -len(format_.value_close.lstrip())]
        end = rf"{_or_none(space)}{loose(format_.value_close)}"
        self._value_end = compiled(rf"{end}\s*(?={follows})")
        self._last_value_end = compiled(rf"{end}\s*(?:(?={follows})|\Z)")

    def read(self) -> Reading[bool]:
        head = yield from self._text.match(self._head)
        if head is None:
            return False
        self._text.since_mark()
        self._message.call(head["name"], "{")
        strings = self._tools.get(head["name"], ())
        is_first = True
        while (key := (yield from self._text.match(self._key))) is not None:
            if not is_first:
                self._message.argue(", ")
            is_first = False
            if not (yield from self._read_value(_Value(self._message, *_type_of(key, strings)))):
                return True
        is_closed = False
        for piece in self._closing:
            is_closed = (yield from self._text.match(piece)) is not None or is_closed
        if is_closed or self._text.is_read:
            self._message.argue("}")
        return True

    def _read_value(self, value: _Value) -> Reading[bool]:
        """Reads a value. Returns False if the text ends within it."""
        value.begin()
        if self._has_cdata and (yield from self._text.match(_CDATA)) is not None:
            yield from self._text.until(_CDATA_END, value.add)
        end = yield from self._text.until(self._value_end, value.add, self._last_value_end)
        if end is None:
            value.cut()
            return False
        value.end()
        return True


def _type_of(key: "regex.Match[str]", strings: tuple[str, ...]) -> tuple[str, bool]:
    """Returns the key, and whether its value is a string."""
    type_ = key.groupdict().get("type")
    is_string = key["key"] in strings if type_ is None else type_ in ("string", "true")
    return key["key"], is_string


def _or_none(space: str) -> str:
    return f"(?:{regex.escape(space)})?" if space else ""
