"""A text that grows, how much of it has been read, and patterns for parts of it.

Readers are generators: they yield when only more text tells what a part is. So they are written as
if the text were whole, and read the same however it is cut. The patterns are of a format's
literals, which models also write with other white space."""

import functools
from collections.abc import Callable, Generator
from typing import TypeVar

import regex
from regex import Match, Pattern

NAME = r"(?P<name>[\w.\-/]{1,256}?)"
_ID = r"[^\s<>\[\]{}\"',|]*"
_SPACE = r"\s*"
_PUNCTUATION = "{}[]:,"
# Parts of literals that models also write otherwise, or leave out.
_VARIANTS = {
    "calls": "calls?",
    "tool_calls": "tool(?:_?calls)?",
    "functions.": r"(?:functions\.)?",
}
_PIECES = regex.compile(
    r"calls(?=_section)|(?<=｜DSML｜)tool_calls|functions\.$"
    r"|\{id\}|(?P<typed>\" \w+=\"\{type\}\")|\s+|.",
    regex.DOTALL,
)

_SEAM = regex.compile(r"\s+|(?<=>)(?=<)", regex.V1)


@functools.cache
def loose(literal: str) -> str:
    """A pattern of the literal in which white space matches any or none, and may also occur between
    tags and around JSON's punctuation."""
    pattern = ""
    for found in _PIECES.finditer(literal.strip()):
        piece = found.group()
        if piece == "{id}":
            pattern += _ID
        elif found["typed"]:
            name = piece.strip('" ').partition("=")[0]
            pattern += rf'"(?:\s+{name}="(?P<type>\w*)")?'
        elif piece in _VARIANTS:
            pattern += _VARIANTS[piece]
        elif piece.isspace():
            pattern = pattern.removesuffix(_SPACE) + _SPACE
        elif piece in _PUNCTUATION:
            pattern = pattern.removesuffix(_SPACE) + _SPACE + regex.escape(piece) + _SPACE
        else:
            pattern += _SPACE if piece == "<" and pattern.endswith(">") else ""
            pattern += regex.escape(piece)
    return pattern.removeprefix(_SPACE).removesuffix(_SPACE)


@functools.cache
def pieces_of(literal: str) -> tuple[str, ...]:
    """Patterns of the parts of a closing literal; models may omit any of them."""
    return tuple(loose(part) for part in _SEAM.split(literal) if part)


def is_mark(literal: str) -> bool:
    """Whether the literal is more than punctuation that other text has, too."""
    return bool(literal.strip(" \n[{\"'"))


@functools.cache
def compiled(pattern: str) -> "regex.Pattern[str]":
    """Compiles with bounded white space: a text of nothing else must not take quadratic time."""
    return regex.compile(pattern.replace(_SPACE, r"\s{0,99}+"), regex.DOTALL)


_T = TypeVar("_T")
Reading = Generator[None, None, _T]
Emit = Callable[[str], None]

_MAX_READ_CHARS = 4096  # that are kept before the text is cut


class GrowingText:
    """The text so far. `has_ended`: no more text comes."""

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._at = 0  # text before it has been read
        self._mark: int | None = None  # text behind it is kept for `since_mark`

    def feed(self, text: str) -> None:
        start = self._at if self._mark is None else self._mark
        if start > _MAX_READ_CHARS:
            self._text = self._text[start:]
            self._at -= start
            self._mark = None if self._mark is None else 0
        self._text += text

    def mark(self, num_back: int = 0) -> None:
        """Keeps the text from here on, or from `num_back` characters before."""
        self._mark = self._at - num_back

    def since_mark(self) -> str:
        """Returns the text read since the mark, which ends here."""
        assert self._mark is not None
        text, self._mark = self.marked, None
        return text

    def rewind(self) -> None:
        """Returns to the mark, which ends here."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    @property
    def is_marked(self) -> bool:
        return self._mark is not None

    @property
    def marked(self) -> str:
        """The text read since the mark."""
        return self._text[self._mark : self._at]

    @property
    def unread(self) -> str:
        return self._text[self._at :]

    @unread.setter
    def unread(self, text: str) -> None:
        self._text = self._text[: self._at] + text

    @property
    def is_read(self) -> bool:
        """Whether all text has been read, and no more comes."""
        return self.has_ended and self._at == len(self._text)

    def ends_within(self, pattern: Pattern[str]) -> bool:
        """Whether the end of the text cuts a match here."""
        found = pattern.match(self._text, self._at, partial=True)
        return self.has_ended and found is not None and found.partial

    def match(
        self, pattern: Pattern[str], last: Pattern[str] | None = None
    ) -> Reading[Match[str] | None]:
        """Reads what the pattern matches here. A match that may become longer waits, so an earlier
        branch of a pattern must not match less than a later one. `last`: as of `until`."""
        while True:
            if self.has_ended:
                pattern = last or pattern
            found = pattern.match(self._text, self._at, partial=not self.has_ended)
            if found is None or not (found.partial or self._may_grow(found)):
                break
            yield
        if found is not None:
            self._at = found.end()
        return found

    def until(
        self, pattern: Pattern[str], emit: Emit, last: Pattern[str] | None = None
    ) -> Reading[Match[str] | None]:
        """Reads up to the first match, and the match. Passes on the text before it, as soon as it
        cannot be part of a match; all of the text if it ends without one. `last` is the pattern for
        its end."""
        while True:
            if self.has_ended:
                pattern = last or pattern
            found = pattern.search(self._text, self._at, partial=not self.has_ended)
            end = len(self._text) if found is None else found.start()
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if found is not None and not (found.partial or self._may_grow(found)):
                self._at = found.end()
                return found
            if self.has_ended:
                return None
            yield

    def _may_grow(self, found: Match[str]) -> bool:
        return found.end() == len(self._text) and not self.has_ended and found.lastgroup == "grows"
