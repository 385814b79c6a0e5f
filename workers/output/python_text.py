"""Reads Python literals as they come, and gives them as JSON. Nothing is ever evaluated."""

import ast
import warnings
from typing import Any

import regex

from workers.output.growing_text import GrowingText, Reading
from workers.output.json_text import MAX_DEPTH, dumped, escaped, parsed

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_NAMES = {"true": True, "false": False, "null": None}
_MAX_CHARS = 2**20
# A quote at the end may become a triple one.
_TOKEN = regex.compile(
    r"""(?P<triple>'''(?:[^\\]|\\.)*?'''|\"{3}(?:[^\\]|\\.)*?\"{3})"""
    r"""|(?P<grows>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<open>[\[({])|(?P<close>[\])}])|(?P<comma>,)|(?P<other>[^\[\](){},'"]+)""",
    regex.DOTALL,
)
_DIFFERS = regex.compile(r"\s*(?:[\[{(]|(?:True|False|None)\s*\Z)")
_REST = regex.compile(r"(?P<rest>.+)", regex.DOTALL)
_CONTROL = regex.compile(r"\\.|[\x00-\x1f]", regex.DOTALL)


def read_literal(text: GrowingText) -> Reading[tuple[str | None, str]]:
    """Reads the value of an argument, up to the comma or parenthesis behind it, and with it.
    Returns the value as JSON, and that character. None: it is no literal.

    Of one that the end of the text cuts, the JSON is cut, too, and the character is "".
    """
    parts: list[str] = []
    opened: list[str] = []
    while True:
        token = yield from text.match(_TOKEN)
        if token is None:
            rest = yield from text.match(_REST)
            return _cut("".join(parts) + (_spelled(rest.group()) if rest else ""), opened), ""
        kind, part = token.lastgroup, token.group()
        if not opened and (kind == "comma" or part == ")"):
            try:
                return dumped(literal("".join(parts))), part
            except ValueError:
                return None, part
        if kind == "open" and len(opened) < MAX_DEPTH:
            opened.append(_CLOSERS[part])
        elif kind == "open" or (kind == "close" and (not opened or opened.pop() != part)):
            return None, ""
        parts.append(_spelled(part) if kind == "grows" else part)


def literal(text: str) -> Any:
    """The value of a Python literal, in which JSON's names are allowed, too. Raises ValueError."""
    if len(text) > _MAX_CHARS:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none
        try:
            return _value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError) as exc:
            raise ValueError("no literal") from exc


def value_of(text: str) -> Any:
    """The value that JSON spells, or Python where it differs, else the text itself."""
    for read in (parsed, literal):
        try:
            return read(text)
        except ValueError:
            if not _DIFFERS.match(text):
                break
    return text


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            if isinstance(value, float) and value - value != 0:  # infinite
                raise ValueError("no JSON")
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -_value(ast.Constant(value))
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _value(value) for key, value in pairs}
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no JSON")


def _cut(text: str, opened: list[str]) -> str | None:
    """The JSON of a literal that is cut, without what would close it."""
    closers = "".join(reversed(opened))
    for quote in ("'", '"', ""):
        try:
            whole = dumped(literal(text + quote + closers))
        except ValueError:
            continue
        num_closers = len(closers) + len(quote)
        return whole[: len(whole) - num_closers]
    return None


def _spelled(string: str) -> str:
    """A string with its control characters escaped."""
    return _CONTROL.sub(lambda found: _escape(found.group()), string)


def _escape(text: str) -> str:
    return escaped(text[-1]) if text[-1] < " " else text
