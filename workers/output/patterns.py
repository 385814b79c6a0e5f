"""Regular expressions for a format's literals, which models also write with other white space."""

import functools

import regex

NAME = r"(?P<name>[\w.\-/]{1,256}?)"
_ID = r"[^\s<>\[\]{}\"',|]*"
_SPACE = r"\s*"
_PUNCTUATION = "{}[]:,"
_PIECES = regex.compile(r"\{id\}|\{type\}|\s+|.", regex.DOTALL)

_SEAM = regex.compile(r"\s+|(?<=>)(?=<)", regex.V1)


@functools.cache
def loose(literal: str) -> str:
    """A pattern of the literal in which white space matches any or none, and may also occur between
    tags and around JSON's punctuation."""
    pattern = ""
    for piece in _PIECES.findall(literal.strip()):
        if piece == "{id}":
            pattern += _ID
        elif piece == "{type}":
            pattern += r"(?P<type>\w*)"
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
