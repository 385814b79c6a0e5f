"""Compiles schemas, regular expressions, grammars and tool calls to grammars of llguidance.

Runs in its own process, because some grammars take seconds or gigabytes to compile.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict

from llguidance import LLMatcher, LLParserLimits, grammar_from

from contract.jobs import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES

_KNOBS = "x-guidance"  # the library's own options inside a schema
_MAX_MESSAGE_CHARS = 300


class Kind(StrEnum):
    """What a grammar is made from."""

    JSON_SCHEMA = "json_schema"  # an object, or true
    REGEX = "regex"  # Rust's syntax, of the whole output
    CHOICE = "choice"  # a list of strings
    GRAMMAR = "grammar"  # Lark or GBNF
    TOOLS = "tools"  # a ToolCalls


class GrammarRefused(Exception):
    """The grammar is rejected. The message is one sentence for the caller; `path` leads to the part
    of the schema."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def compile_grammar(kind: Kind, value: Any, is_strict: bool = True) -> str:
    """llguidance's serialised grammar. Unless `is_strict`, keywords of a schema that the library
    cannot enforce are dropped. Raises GrammarRefused."""
    match kind:
        case Kind.JSON_SCHEMA:
            grammar = _of_schema(value, is_strict)
        case Kind.REGEX:
            grammar = _checked(LLMatcher.grammar_from_regex(value))
        case Kind.CHOICE:
            grammar = _checked(grammar_from("choice", json.dumps(value)))
        case Kind.GRAMMAR:
            grammar = _of_grammar(value)
        case Kind.TOOLS:
            grammar = _checked(tool_grammar(value))
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the grammar has over {MAX_GRAMMAR_BYTES} bytes")
    return grammar


class ToolCalls(TypedDict):
    """Calls of functions, in a model's format."""

    format: Mapping[str, str | None]  # the fields of ToolFormat
    special_ids: Mapping[str, int]  # special tokens that the format's text contains
    functions: Sequence[tuple[str, Any, bool]]  # name, schema of the arguments, whether strict
    is_forced: bool  # False: the output may also be text, or begin with text
    may_repeat: bool


def tool_grammar(calls: ToolCalls) -> str:
    """A grammar in Lark's syntax. Raises GrammarRefused."""
    format_, ids = calls["format"], calls["special_ids"]

    def literal(text: str | None) -> str:
        """Text and special tokens in Lark's syntax."""
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text or "") if ids else [text]
        return " ".join(
            f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    rules, names = [], []
    for i, (name, schema, is_strict) in enumerate(calls["functions"]):
        try:
            _of_schema(schema, is_strict)
        except GrammarRefused as refusal:
            path = f"{i}.function.parameters"
            raise GrammarRefused(str(refusal), f"{path}.{refusal.path}".rstrip(".")) from None
        arguments = json.dumps({**schema, _KNOBS: _options(is_strict)})
        rules.append(f"call_{i}: {literal(name)} {literal(format_['middle'])} %json {arguments}")
        names.append(f"call_{i}")
    begin, more = format_["begin"] or "", ""
    if calls["may_repeat"] and format_["between"] is not None:
        more = f"({literal(format_['between'])} call)*"
    body = f"call {more} {literal(format_['end'])}"
    if calls["is_forced"]:
        start = [f"start: {literal(begin)} {body}"]
    else:
        opening = begin.rpartition("{")[0].rstrip() or begin
        start = [
            "start: TEXT | after_text",
            f"after_text: text_to_call {literal(begin.removeprefix(opening))} {body}",
            f"text_to_call[lazy]: TEXT {literal(opening)}",
            r"TEXT: /(.|\n)*/",
        ]
        if opening in ids:
            start[2] = f"text_to_call: TEXT {literal(opening)}"
    return "\n".join(["%llguidance {}", *start, "call: " + " | ".join(names), *rules])


def _of_grammar(text: str) -> str:
    if "%llguidance" in text or _KNOBS in text:
        raise GrammarRefused("a grammar may not set options of the library")
    try:
        return _checked(grammar_from("grammar", text))
    except ValueError as error:
        raise GrammarRefused(_sentence(str(error))) from error


def _checked(grammar: str) -> str:
    if faults := _faults(grammar, is_strict=False):
        raise GrammarRefused(faults[0])
    return grammar


def _of_schema(schema: Any, is_strict: bool) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema must be an object")
    if _KNOBS in schema:
        raise GrammarRefused("a schema may not set options of the library", _KNOBS)
    grammar = _serialised(schema, is_strict)
    if faults := _faults(grammar, is_strict):
        raise GrammarRefused(faults[0], _path_of(faults[0], schema, is_strict))
    return grammar


def _options(is_strict: bool) -> Any:
    """JSON formatted as by `json.dumps`, so that names and separators are forced and white space is
    bounded. Unless `is_strict`, keywords that cannot be enforced are dropped."""
    return {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": not is_strict,
    }


def _serialised(schema: dict[str, Any], is_strict: bool) -> str:
    """Raises GrammarRefused for numbers that are too large."""
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides=_options(is_strict),
        )
    except ValueError as error:
        raise GrammarRefused(_sentence(str(error))) from error


def _faults(grammar: str, is_strict: bool) -> list[str]:
    """Errors of the grammar; with `is_strict`, also dropped keywords."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, limits=LLParserLimits(**GRAMMAR_LIMITS)
    )
    return [_sentence(message) for message in messages] if is_error or is_strict else []


def _path_of(fault: str, schema: dict[str, Any], is_strict: bool) -> str:
    """The path to the innermost part that has this error by itself; "": the whole schema."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    path: list[str] = []
    part = schema
    while True:
        for names, child in _children(part):
            if fault in _faults(_serialised({**definitions, **child}, is_strict), is_strict):
                path += names
                part = child
                break
        else:
            return ".".join(path)


def _children(schema: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The direct subschemas of a schema with their paths, definitions first."""
    for keyword in sorted(schema, key=lambda keyword: keyword not in _DEFINITIONS):
        value = schema[keyword]
        if keyword in _OF_NAMES and isinstance(value, dict):
            yield from (([keyword, n], each) for n, each in value.items() if isinstance(each, dict))
        elif keyword in _LISTS and isinstance(value, list):
            pairs = enumerate(value)
            yield from (([keyword, str(i)], each) for i, each in pairs if isinstance(each, dict))
        elif keyword in _SINGLE and isinstance(value, dict):
            yield [keyword], value


_DEFINITIONS = ("$defs", "definitions")
_OF_NAMES = {*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SINGLE = {
    "items",
    "additionalProperties",
    "not",
    "contains",
    "propertyNames",
    "if",
    "then",
    "else",
}


def _sentence(message: str) -> str:
    """An error message of the library, without the source that it quotes."""
    first, *others = message.splitlines()
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    text = _PLACE.sub("", " ".join([first, *reasons]))
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


_PLACE = re.compile(r"^at \d+\(\d+\): ")
