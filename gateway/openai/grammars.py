"""Schemas, regular expressions and grammars that callers send, as grammars of llguidance.

Runs in a process of its own: some grammars take seconds or gigabytes to compile.
"""

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from contract.grammars import LIMITS, MAX_GRAMMAR_BYTES

_KNOBS = "x-guidance"  # the library's own options inside a schema
_MAX_MESSAGE_CHARS = 300


class Kind(StrEnum):
    """What a caller sent."""

    JSON_SCHEMA = "json_schema"  # an object, or true
    REGEX = "regex"  # Rust's syntax, of the whole output
    CHOICE = "choice"  # a list of strings
    GRAMMAR = "grammar"  # Lark or GBNF


class GrammarRefused(Exception):
    """The message is one sentence for the caller; `path` leads to the part of the schema."""

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
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the grammar has over {MAX_GRAMMAR_BYTES} bytes")
    return grammar


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


def _serialised(schema: dict[str, Any], is_strict: bool) -> str:
    """Laid out as `json.dumps` does it, so that names and separators are forced text, and no white
    space goes on for ever. Raises GrammarRefused for numbers that are too large."""
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
                "lenient": not is_strict,
            },
        )
    except ValueError as error:
        raise GrammarRefused(_sentence(str(error))) from error


def _faults(grammar: str, is_strict: bool) -> list[str]:
    """What the library refuses, or would drop."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, limits=LLParserLimits(**LIMITS)
    )
    return [_sentence(message) for message in messages] if is_error or is_strict else []


def _path_of(fault: str, schema: dict[str, Any], is_strict: bool) -> str:
    """Where the deepest part lies that has the same fault alone; "": the whole."""
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
    """The schemas directly below one, with their paths; definitions before what refers to them."""
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
    """A message of the library without the source that it quotes."""
    first, *others = message.splitlines()
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    text = _PLACE.sub("", " ".join([first, *reasons]))
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


_PLACE = re.compile(r"^at \d+\(\d+\): ")
