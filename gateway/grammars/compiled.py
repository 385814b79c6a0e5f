"""Compiles schemas, regular expressions, grammars and tool calls to grammars of llguidance.

`python -m gateway.grammars.compiled` does so in a process of its own, because some grammars take
seconds or gigabytes to compile.

llguidance compiles grammars in which nothing may follow: a rule that consists of itself, a pattern
of names that are all taken, more alternatives at one place than it considers. A worker would find
out in the middle of an answer. So two outputs are written here, byte by byte. They prove nothing,
but ordinary outputs have the same faults.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from contract.jobs import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES
from gateway.child import Refused, serve
from gateway.grammars.rules.calls import Frame, Reasoning, ToolCalls, free_rules, tool_rules
from gateway.grammars.rules.lark import KNOBS, Lark, Marks, json_options, quoted
from gateway.grammars.schemas.lengths import check_lengths
from gateway.grammars.schemas.preparation import prepare
from gateway.grammars.schemas.refusals import GrammarRefused as GrammarRefused
from gateway.http.strict_json import parse_json

_BYTES = LLTokenizer("byte")  # a token for each byte
_END: int = _BYTES.eos_token
_MAX_MESSAGE_CHARS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")
# A worker's tokens have many bytes, so a step needs, and has, a higher limit.
LIMITS = LLParserLimits(
    **GRAMMAR_LIMITS | {"step_lexer_fuel": 200_000, "step_max_items": 30_000},
)
_NUM_STEPS = 150  # of a walk, apart from forced text
_TEXT = 64  # only within free text may more bytes than this follow
_QUOTE = ord('"')
_CLOSING, _OPENING = tuple(b'"}]'), tuple(b"{[")
# Texts of the library's errors, and their meanings.
_REASONS = {
    "row has": "too many alternatives at one place, as of optional properties or anyOf",
    "Too many items": "too much text is forced at once, or it is too ambiguous",
    "lexer": "a pattern, a length or a number is too complex",
    "fuel": "a pattern, a length or a number is too complex",
}
_NO_WAY = "an output can come to a place where nothing may follow"

Choose = Callable[[int], int]  # chooses one of the tokens that may follow, given as bits


def fault_of(grammar: str) -> str:
    """Why outputs of the grammar cannot be forced, in a sentence; "" if no fault is found."""
    matcher = _matcher(grammar)
    return sentence(matcher.get_error()) if matcher.is_error() else _dead_end(matcher)


def dead_end(grammar: str) -> str:
    """Returns why an output of a valid grammar cannot go on. Ignores grammars with tokens."""
    matcher = _matcher(grammar)
    return "" if matcher.is_error() else _dead_end(matcher)


def sentence(message: str) -> str:
    """An error message of the library, without the source that it quotes."""
    first, *others = message.splitlines()
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    text = _PLACE.sub("", " ".join([first, *reasons]))
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


def _matcher(grammar: str) -> LLMatcher:
    return LLMatcher(_BYTES, grammar, log_level=0, limits=LIMITS)


def _dead_end(matcher: LLMatcher) -> str:
    """Returns the first fault that a walk finds."""
    walks: list[Choose] = [_Closing(), _Varied()]
    return next(filter(None, (_fault(matcher.deep_copy(), choose) for choose in walks)), "")


def _fault(matcher: LLMatcher, choose: Choose) -> str:
    for _ in range(_NUM_STEPS):
        if forced := matcher.compute_ff_bytes():
            matcher.consume_tokens(list(forced))
        mask = 0 if matcher.is_stopped() else int.from_bytes(matcher.compute_bitmask(), "little")
        token = choose(mask) if mask else _END
        if token == _END or not matcher.consume_token(token):
            break
    if not matcher.is_error():
        return ""
    error = matcher.get_error()
    return next((reason for part, reason in _REASONS.items() if part in error), _NO_WAY)


def _tokens(mask: int) -> list[int]:
    return [token for token in (*range(256), _END) if mask >> token & 1]


class _Closing:
    """Chooses what ends strings, lists, objects and the output as soon as possible."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def __call__(self, mask: int) -> int:
        for token in (_END, *_CLOSING):
            if mask >> token & 1:
                return token
        allowed = _tokens(mask)
        plain = [token for token in allowed if token not in _OPENING]
        return self._draw.choice(plain or allowed)


class _Varied:
    """Chooses what it has chosen least often, and writes no long texts."""

    def __init__(self) -> None:
        self._num_taken: Counter[int] = Counter()

    def __call__(self, mask: int) -> int:
        if mask >> _QUOTE & 1 and mask.bit_count() > _TEXT:
            return _QUOTE
        token = min(_tokens(mask), key=self._num_taken.__getitem__)
        self._num_taken[token] += 1
        return token


class Kind(StrEnum):
    """What a grammar is made from."""

    JSON_SCHEMA = "json_schema"  # an object, its text, or true
    REGEX = "regex"  # Rust's syntax, of the whole output
    CHOICE = "choice"  # a list of strings
    GRAMMAR = "grammar"  # Lark or GBNF
    TOOLS = "tools"  # a ToolCalls
    TEXT = "text"  # any text; the fields of a ToolFormat, if it may have calls


class Around(TypedDict):
    """What surrounds an answer: how the model reasons, and the tokens of its formats."""

    marks: Marks
    reasoning: Reasoning | None


_NOTHING: Around = {"marks": {"ids": {}, "added": [], "ends": []}, "reasoning": None}


def compile_grammar(
    kind: Kind, value: Any = None, is_strict: bool = True, around: Around = _NOTHING
) -> str:
    """llguidance's serialised grammar. Unless `is_strict`, keywords of a schema that the library
    cannot enforce are dropped. Raises GrammarRefused."""
    lark = Lark(around["marks"], value["format"]["id_length"] if kind is Kind.TOOLS else 0)
    frame = Frame(lark, around["reasoning"])
    answers: list[dict[str, Any]] = []
    match kind:
        case Kind.TOOLS:
            output = _of_tools(lark, frame, value)
            if (given := value.get("answer")) is not None:
                answer = _answer(Kind(given["kind"]), given["value"], given["is_strict"])
                answers = [{"name": "answer"} | answer]
        case Kind.TEXT:
            output = free_rules(lark, frame, value)
        case _:
            answers = [{"name": "answer"} | _answer(kind, value, is_strict)]
            output = frame.around("@answer")
    lark.rule("start", output)
    whole = {"grammars": [{"lark_grammar": str(lark)}, *answers]}
    grammar = json.dumps(whole, ensure_ascii=False)
    if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the grammar has over {MAX_GRAMMAR_BYTES} bytes")
    # Schemas and choices, which may be large, were checked by themselves.
    return _checked(grammar) if kind in (Kind.TOOLS, Kind.TEXT, Kind.GRAMMAR) else grammar


def _answer(kind: Kind, value: Any, is_strict: bool) -> dict[str, Any]:
    """Returns the grammar of an answer in llguidance's form. Raises GrammarRefused."""
    match kind:
        case Kind.JSON_SCHEMA:
            return {"json_schema": _of_schema(value, is_strict)}
        case Kind.REGEX:
            [grammar] = json.loads(_followed(LLMatcher.grammar_from_regex(value)))["grammars"]
            return {"lark_grammar": grammar["lark_grammar"]}
        case Kind.CHOICE:
            # One terminal: a rule of each takes too many items of the parser.
            choices = " | ".join(map(quoted, value))
            return {"lark_grammar": _followed(f"start: CHOICE\nCHOICE: {choices}")}
    return {"lark_grammar": _of_grammar(value)}


def _of_tools(lark: Lark, frame: Frame, calls: ToolCalls) -> str:
    functions: list[tuple[int, str, Any, bool]] = []
    for number, name, schema, is_strict in calls["functions"]:
        try:
            functions.append((number, name, _of_schema(schema, is_strict), is_strict))
        except GrammarRefused as refusal:
            path = (f"{number}.function.parameters", *refusal.path)
            raise GrammarRefused(str(refusal), path) from None
    return tool_rules(lark, frame, {**calls, "functions": functions})


def _of_grammar(text: str) -> str:
    if "%llguidance" in text or KNOBS in text:
        raise GrammarRefused("a grammar may not set options of the library")
    try:
        grammar = _checked(grammar_from("grammar", text))
    except ValueError as error:
        raise GrammarRefused(sentence(str(error))) from error
    if fault := dead_end(grammar):
        raise GrammarRefused(fault)
    return grammar


def _checked(grammar: str) -> str:
    """Returns the grammar if it compiles. Raises GrammarRefused."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        raise GrammarRefused(sentence(messages[0]))
    return grammar


def _followed(grammar: str) -> str:
    """Returns the grammar if its outputs can go on. Raises GrammarRefused."""
    if fault := fault_of(grammar):
        raise GrammarRefused(fault)
    return grammar


def _of_schema(schema: Any, is_strict: bool) -> dict[str, Any]:
    """Returns a grammar of what can be enforced of the schema, with the library's options. Raises
    GrammarRefused."""
    if isinstance(schema, str):  # as vLLM's clients send it
        try:
            schema = parse_json(schema.encode())
        except ValueError:
            raise GrammarRefused("it is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema must be an object")
    if KNOBS in schema:
        raise GrammarRefused("a schema may not set options of the library", (KNOBS,))

    def fault(part: dict[str, Any]) -> str:
        try:
            grammar = LLMatcher.grammar_from_json_schema(part, overrides=json_options(is_strict))
        except ValueError as error:  # what is no JSON
            return sentence(str(error))
        return fault_of(grammar)

    prepared = prepare(schema, is_strict, fault)
    check_lengths(prepared)
    if found := fault(prepared.schema):
        part, found = prepared.innermost(found, fault)
        raise GrammarRefused(found, prepared.place_of(part))
    return {**prepared.schema, KNOBS: json_options(is_strict)}


def _answered(request: Any) -> str:
    try:
        return compile_grammar(**request | {"kind": Kind(request["kind"])})
    except GrammarRefused as refusal:
        raise Refused(json.dumps([".".join(refusal.path), str(refusal)])) from None
    except MemoryError:
        raise
    except Exception:  # of a keyword with a value that no schema has, as an enum of 1.5
        raise Refused(json.dumps(["", "it is not a valid schema"])) from None


if __name__ == "__main__":
    serve(lambda _: _answered)
