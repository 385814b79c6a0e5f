"""Calls that are written as in Python, or as Gemma 4 does."""

from workers.output.call_reader import CallReader
from workers.output.growing_text import Reading
from workers.output.json_text import GEMMA, dumped, read_json
from workers.output.patterns import NAME, compiled
from workers.output.python_text import read_literal

_CALL = compiled(rf"\s*{NAME}\s*\(")
_END = compiled(r"\s*\)")
_KEY = compiled(r"\s*(?P<key>\w+)\s*=(?!=)\s*")
_NEXT = compiled(r"\s*,")
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
            if (yield from self._text.match(_NEXT)) is None:
                self._text.since_mark()
                yield from self._text.match(_LIST_END)
                return True
        return False

    def _read_call(self) -> Reading[bool]:
        call = yield from self._text.match(_CALL)
        if call is None or not self._is_offered(call["name"]):
            return False
        if (yield from self._text.match(_END)) is not None:
            self._text.since_mark()
            self._message.call(call["name"], "{}")
            return True
        is_first, end = True, ","
        while end == ",":
            if not self._text.is_marked:
                self._text.mark()
            key = yield from self._text.match(_KEY)
            if key is None:  # perhaps after a last comma
                if not is_first and (yield from self._text.match(_END)) is not None:
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
