"""Reads one value as it comes, written as JSON, as Python or as Gemma does, and passes it on as
valid JSON. Evaluates nothing.

Raw control characters in strings are escaped, and so are backslashes that escape nothing. In
Gemma's spelling strings are enclosed in <|"|> and keys may be bare."""

import ast
import json
import math
import warnings
from dataclasses import dataclass
from typing import Any

import regex

from workers.output.growing_text import Emit, GrowingText, Reading

MAX_DEPTH = 128  # of a value: less than JSON readers allow

_STRING = r'(?P<quote>")'
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}
_SPACE = regex.compile(r"[ \t\r\n]+")
_PIECE = regex.compile(
    r'(?P<plain>[^"\\\x00-\x1f]+)|(?P<raw>[\x00-\x1f]+)|(?P<end>")'
    r'|(?P<escape>\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|(?P<grows>\\(?:u[0-9a-fA-F]{0,3})?)'
)
_MARK = '<|"|>'
_QUOTED_END = regex.compile(regex.escape(_MARK))
_KEY = r"""(?P<key>[^\s:,{}\[\]<"][^:,{}\[\]<"]{0,127}+)(?=:)"""


@dataclass(frozen=True)
class Lexis:
    """How strings and keys are written."""

    patterns: dict[str, "regex.Pattern[str]"]  # by the expected part
    has_marks: bool  # around strings


def _lexis(string: str, key: str, has_marks: bool) -> Lexis:
    names = "|".join(["true", "false", "null", *(_OF_PYTHON if has_marks else ())])
    scalar = rf"(?P<grows>(?:{_NUMBER}|{names})(?![-+.\w]))"
    value = rf"{string}|(?P<open>[{{\[])|{scalar}"
    spellings = {
        "value": value,
        "item or end": rf"(?P<close>\])|{value}",
        "key": key,
        "key or end": rf"(?P<close>\}})|{key}",
        "colon": "(?P<colon>:)",
        "more in {": r"(?P<comma>,)|(?P<close>\})",
        "more in [": r"(?P<comma>,)|(?P<close>\])",
    }
    patterns = {name: regex.compile(spelling) for name, spelling in spellings.items()}
    return Lexis(patterns, has_marks)


JSON = _lexis(_STRING, _STRING, has_marks=False)
GEMMA = _lexis(
    f"(?P<quote>{regex.escape(_MARK)})", f"(?P<quote>{regex.escape(_MARK)})|{_KEY}", has_marks=True
)


def read_json(text: GrowingText, emit: Emit, lexis: Lexis = JSON) -> Reading[bool]:
    """Passes on the text of one value as it comes. Returns False if it is not one; the text is then
    read up to the fault, or to its end."""
    opened: list[str] = []
    expected = "value"
    while True:
        while (space := (yield from text.match(_SPACE))) is not None:
            emit(space.group() if opened and not lexis.has_marks else "")
        token = yield from text.match(lexis.patterns[expected])
        if token is None:
            return False
        kind, is_key = token.lastgroup, expected.startswith("key")
        emit(_respelled(token) if lexis.has_marks else token.group())
        if kind == "quote" and not (yield from _read_string(text, emit, lexis.has_marks)):
            return False
        if kind == "open":
            if len(opened) == MAX_DEPTH:
                return False
            opened.append(token["open"])
            expected = "key or end" if token["open"] == "{" else "item or end"
            continue
        if kind == "close":
            opened.pop()
        if is_key and kind != "close":
            expected = "colon"
        elif kind == "colon":
            expected = "value"
        elif kind == "comma":
            expected = "key" if opened[-1] == "{" else "value"
        elif opened:
            expected = f"more in {opened[-1]}"
        else:
            return True


def read_string(text: GrowingText, emit: Emit) -> Reading[bool]:
    """Reads a JSON string behind its opening quote, including the closing one."""
    return (yield from _read_string(text, emit, has_marks=False))


def _read_string(text: GrowingText, emit: Emit, has_marks: bool) -> Reading[bool]:
    if has_marks:
        end = yield from text.until(_QUOTED_END, lambda piece: emit(escaped(piece)))
        emit("" if end is None else '"')
        return end is not None
    while True:
        piece = yield from text.match(_PIECE)
        if piece is None:
            return False
        match piece.lastgroup:
            case "raw":
                emit(escaped(piece.group()))
            case "grows":
                emit("\\" + piece.group())
            case _:
                emit(piece.group())
        if piece.lastgroup == "end":
            return True


def _respelled(token: "regex.Match[str]") -> str:
    match token.lastgroup:
        case "quote":
            return '"'
        case "key":
            return dumped(token["key"].rstrip())
        case "comma":
            return ", "
        case "colon":
            return ": "
    return _OF_PYTHON.get(token.group(), token.group())


def escaped(text: str) -> str:
    """Returns text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def parsed(text: str) -> Any:
    """The value that JSON spells, raw control characters in strings included. Raises ValueError."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as exc:
        raise ValueError("too deep") from exc


def as_object(text: str) -> str | None:
    """Returns the JSON text of an object that text spells; None if it spells none."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    return dumped(value) if isinstance(value, dict) else None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


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
        if kind == "quote" and not (yield from _read_python_string(text, part, parts)):
            return _cut("".join(parts), part, opened), ""
    return _cut("".join(parts), "", opened), ""


def _read_python_string(text: GrowingText, quote: str, parts: list[str]) -> Reading[bool]:
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
