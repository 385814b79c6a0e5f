"""Compiles schemas, regular expressions, grammars and tool calls to grammars of llguidance.

Runs in its own process, because some grammars take seconds or gigabytes to compile.
"""

import json
from enum import StrEnum
from typing import Any, TypedDict

from llguidance import LLMatcher, grammar_from

from contract.jobs import MAX_GRAMMAR_BYTES
from gateway.grammars.checks import LIMITS, dead_end, fault_of, sentence
from gateway.grammars.rules.arguments import ArgumentsRefused
from gateway.grammars.rules.calls import ToolCalls, free_rules, tool_rules
from gateway.grammars.rules.frames import Frame, Reasoning
from gateway.grammars.rules.lark import KNOBS, Lark, Marks, json_options, quoted
from gateway.grammars.schemas.lengths import check_lengths
from gateway.grammars.schemas.preparation import prepare
from gateway.grammars.schemas.refusals import SchemaRefused


class Kind(StrEnum):
    """What a grammar is made from."""

    JSON_SCHEMA = "json_schema"  # an object, or true
    REGEX = "regex"  # Rust's syntax, of the whole output
    CHOICE = "choice"  # a list of strings
    GRAMMAR = "grammar"  # Lark or GBNF
    TOOLS = "tools"  # a ToolCalls
    TEXT = "text"  # any text; the fields of a ToolFormat, if it may have calls


class GrammarRefused(Exception):
    """The grammar is rejected. The message is one sentence for the caller; `path` leads to the part
    of the schema."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


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
            path = f"{number}.function.parameters.{refusal.path}".rstrip(".")
            raise GrammarRefused(str(refusal), path) from None
    try:
        return tool_rules(lark, frame, {**calls, "functions": functions})
    except ArgumentsRefused as refusal:
        raise GrammarRefused(str(refusal), ".".join(refusal.path)) from None


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
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema must be an object")
    if KNOBS in schema:
        raise GrammarRefused("a schema may not set options of the library", KNOBS)

    def fault(part: dict[str, Any]) -> str:
        return _fault_of_schema(part, is_strict)

    try:
        prepared = prepare(schema, is_strict, fault)
        check_lengths(prepared)
    except SchemaRefused as refusal:
        raise GrammarRefused(str(refusal), ".".join(refusal.path)) from None
    if found := fault(prepared.schema):
        part, found = prepared.innermost(found, fault)
        raise GrammarRefused(found, ".".join(prepared.place_of(part)))
    return {**prepared.schema, KNOBS: json_options(is_strict)}


def _fault_of_schema(schema: dict[str, Any], is_strict: bool) -> str:
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=json_options(is_strict))
    except ValueError as error:  # what is no JSON
        return sentence(str(error))
    return fault_of(grammar)
