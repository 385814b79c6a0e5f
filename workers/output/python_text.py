"""Reads Python literals as they come, and passes them on as JSON. Evaluates nothing."""

import ast
import warnings
from typing import Any

import regex

from workers.output.growing_text import GrowingText, Reading
from workers.output.json_text import MAX_DEPTH, dumped, escaped, parsed

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_NAMES = {"true": True, "false": False, "null": None}
_MAX_CHARS = 2**20
# A quote, or two, may become three.
_TOKEN = regex.compile(
    r"""(?P<quote>'{3}|"{3}|'(?=[^'])|"(?=[^"]))|(?P<grows>''|"")"""
    r"""|(?P<open>[\[({])|(?P<close>[\])}])|(?P<comma>,)|(?P<other>[^\[\](){},'"]+)"""
)
# A quote is part of the string unless a list or a call continues: not all models escape it.
_FOLLOWS = r"\s{0,99}+(?:[,)\]}:]"


def _pieces(quote: str, follows: str) -> "regex.Pattern[str]":
    plain = rf"(?P<escape>\\.)|(?P<plain>[^{quote[0]}\\]+)"
    literal_quote = rf"(?P<grows>{quote[0]}{{1,{len(quote)}}}+\s{{0,99}}+)"
    pattern = rf"(?P<end>{quote})(?={follows})|{plain}|{literal_quote}"
    return regex.compile(pattern, regex.DOTALL)


_PIECES = {
    quote: (_pieces(quote, _FOLLOWS + ")"), _pieces(quote, _FOLLOWS + r"|\Z)"))
    for quote in ("'", '"', "'''", '"""')
}
_CONTROL = regex.compile(r"\\?[\x00-\x1f]")  # in a piece, which is one escape or has none
_DIFFERS = regex.compile(r"\s*(?:[\[{(]|(?:True|False|None)\s*\Z)")


def read_literal(text: GrowingText) -> Reading[tuple[str | None, str]]:
    """Reads the value of an argument, and the comma or parenthesis behind it. Returns the value as
    JSON, and that character. None: it is not a literal.

    If the end of the text cuts the literal, the JSON is cut, too, and the character is "".
    """
    parts: list[str] = []
    opened: list[str] = []
    while (token := (yield from text.match(_TOKEN))) is not None:
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
        parts.append(part)
        if kind == "quote" and not (yield from _read_string(text, part, parts)):
            return _cut("".join(parts), part, opened), ""
    return _cut("".join(parts), "", opened), ""


def _read_string(text: GrowingText, quote: str, parts: list[str]) -> Reading[bool]:
    """Reads a string behind its opening quote, and escapes control characters. False: it is cut."""
    while (piece := (yield from text.match(*_PIECES[quote]))) is not None:
        spelled = _CONTROL.sub(lambda found: escaped(found.group()[-1]), piece.group())
        if piece.lastgroup == "grows":
            spelled = spelled.replace(quote[0], "\\" + quote[0])
        parts.append(spelled)
        if piece.lastgroup == "end":
            return True
    return False


def literal(text: str) -> Any:
    """Returns the value of a Python literal, which may contain JSON's names. Raises ValueError."""
    if len(text) > _MAX_CHARS:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes
        try:
            return _value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError) as exc:
            raise ValueError("no literal") from exc


def value_of(text: str) -> Any:
    """Returns the value that text spells in JSON, or in Python; otherwise the text itself."""
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


def _cut(text: str, quote: str, opened: list[str]) -> str | None:
    """Returns the JSON of a cut literal, within a string or not, without what would close it."""
    closers = "".join(reversed(opened))
    try:
        whole = dumped(literal(text + quote + closers))
    except ValueError:
        return None
    return whole[: len(whole) - len(closers) - bool(quote)]
