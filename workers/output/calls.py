"""Reads the tool calls in an output: where they begin, one behind another, and where they end.

For the text between the marks, each syntax has a module or class of its own.
"""

from collections.abc import Callable, Mapping

import regex

from contract.output_formats import ToolFormat
from workers.output.call_reader import CallReader
from workers.output.growing_text import GrowingText, Reading
from workers.output.json_calls import JsonCall, ObjectCall
from workers.output.literal_calls import GemmaCall, PythonCalls
from workers.output.message import Message
from workers.output.patterns import compiled, is_mark, loose, pieces_of
from workers.output.tag_calls import TagCall

_Tools = Mapping[str, tuple[str, ...]]
_SYNTAXES: dict[str, Callable[[ToolFormat, _Tools, GrowingText, Message], CallReader]] = {
    "object": ObjectCall,
    "json": JsonCall,
    "tags": TagCall,
    "python": PythonCalls,
    "gemma": GemmaCall,
}
_PYTHON_TAG = r"(?:<\|python_tag\|>)?"  # of Llama: before calls, at will


class Calls:
    """Reads calls into a message. `start` is a pattern of the beginning of the first; in a format
    without marks it counts only at the beginning of the answer."""

    def __init__(
        self,
        format_: ToolFormat,
        tools: _Tools,
        text: GrowingText,
        message: Message,
    ) -> None:
        self._text, self._message = text, message
        self._call = _SYNTAXES[format_.syntax](format_, tools, text, message)
        self.is_bare = format_.is_bare
        head = self._call.head.replace("(?P<name>", "(?:")
        begin, opening = _loose_begin(format_.begin), loose(format_.open)
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
