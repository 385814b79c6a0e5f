"""Arguments whose values are literals of a language: Python's, or Gemma 4's spelling of JSON."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from contract.output_formats import GEMMA_QUOTE
from gateway.grammars.rules.arguments import (
    OF_CHOICES,
    OF_OBJECTS,
    OF_TEXTS,
    Arguments,
    Path,
    choices_of,
    says_nothing,
    times,
)
from gateway.grammars.rules.lark import Lark, either, json_rule, quoted
from gateway.grammars.rules.parameter_types import Schema, resolved

_OF_ARRAYS = frozenset({"type", "items", "minItems", "maxItems"})
_OF_NUMBERS = frozenset(
    {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_PATTERNS = frozenset({"pattern", "format"})
_ALTERNATIVES = ("anyOf", "oneOf")  # no `oneOf` here overlaps: JSON's grammar took it
_BARE_KEY = re.compile(r"[A-Za-z0-9_.\-]+")
_NUMBERS = {  # limited to a size that every reader accepts
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/",
}
_QUOTED = r"""{quote}([^{quote}\\\x00-\x1f]|\\['"\\nrt]){times}{quote}"""  # in Python


class _Literals(Arguments, ABC):
    """Arguments whose values are literals of a language."""

    true = false = null = ""
    separator = pair = ""  # between arguments; between a name and its value

    def __init__(self, lark: Lark, name: str, schema: Schema, is_strict: bool) -> None:
        super().__init__(lark, name, schema, is_strict)
        self._references: dict[str, str] = {}

    def whole(self) -> str:
        schema = self.parameters()
        if self.takes_any(schema):
            name = self.lark.rule("PARAMETER", r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            return self.repeated(f"{name} {quoted(self.pair)} {self.anything()}", 0, None)
        items = [
            (f"{self.parameter(name)} {self.value(each, ('properties', name))}", is_required)
            for name, each, is_required in self.properties(schema)
        ]
        return self.sequence(items, self.separator)

    def parameter(self, name: str) -> str:
        return quoted(name + self.pair)

    def value(self, schema: Any, path: Path) -> str:
        """A rule for a value that fits the schema."""
        if not isinstance(schema, dict) or says_nothing(schema):
            return self.anything()
        if isinstance(name := schema.get("$ref"), str):
            return self._referenced(name, schema, path)
        if (choices := choices_of(schema)) is not None:
            self.check(schema, OF_CHOICES, path)
            return either(*map(self.literal, choices))
        for keyword in _ALTERNATIVES:
            if isinstance(parts := schema.get(keyword), list):
                self.check(schema, frozenset({keyword}), path)
                each = (self.value(p, (*path, keyword, str(i))) for i, p in enumerate(parts))
                return either(*each)
        types = schema.get("type") or _type_shown(schema)
        known = types if isinstance(types, list) else [types] if types else []
        if not known:
            self.check(schema, frozenset(), path)
            return self.anything()
        return either(*(self._of_type(type_, schema, path) for type_ in known))

    def _of_type(self, type_: str, schema: Schema, path: Path) -> str:
        match type_:
            case "string":
                return self.string(schema, path)
            case "boolean":
                self.check(schema, frozenset({"type"}), path)
                return either(quoted(self.true), quoted(self.false))
            case "null":
                return quoted(self.null)
            case "array":
                self.check(schema, _OF_ARRAYS, path)
                item = self.value(schema.get("items"), (*path, "items"))
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                return f'"[" {self.repeated(item, least, most)} "]"'
            case "object":
                return f'"{{" {self._members(schema, path)} "}}"'
        self.check(schema, _OF_NUMBERS, path)
        bounds = {name: schema[name] for name in _OF_NUMBERS - {"type"} if name in schema}
        if bounds:
            return json_rule({"type": type_, **bounds}, self.is_strict)
        return self.lark.rule(type_.upper(), _NUMBERS[type_])

    def _members(self, schema: Schema, path: Path) -> str:
        self.check(schema, OF_OBJECTS, path)
        items = [
            (f"{self.key(name)} {self.value(each, (*path, 'properties', name))}", is_required)
            for name, each, is_required in self.properties(schema)
        ]
        if not self.takes_any(schema):
            return self.sequence(items, self.separator)
        others = schema.get("additionalProperties", True)
        value = self.value(others, (*path, "additionalProperties"))
        return self.repeated(f"{self.any_key()} {value}", 0, None)

    def _referenced(self, name: str, schema: Schema, path: Path) -> str:
        """The name of a schema's own rule, because schemas may refer to themselves."""
        self.check(schema, frozenset({"$ref"}), path)
        if name not in self._references:
            rule = self._references[name] = f"{self.name}_part_{len(self._references)}"
            self.lark.rule(rule, self.value(resolved(schema, self.root), path))
        return self._references[name]

    def repeated(self, item: str, least: int, most: int | None) -> str:
        """A rule for `least` to `most` items with separators."""
        if most is not None and most < 1:
            return ""
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f"({quoted(self.separator)} {item}){times}"
        return f"{item} {more}" if least else f"({item} {more})?"

    def anything(self) -> str:
        """A rule for any value."""
        name = "anything"
        items = self.repeated(name, 0, None)
        members = self.repeated(f"{self.any_key()} {name}", 0, None)
        number = self._of_type("number", {"type": "number"}, ())
        words = map(quoted, (self.true, self.false, self.null))
        parts = [self.string({}, ()), number, *words, f'"[" {items} "]"', f'"{{" {members} "}}"']
        return self.lark.rule(name, " | ".join(parts))

    def literal(self, value: Any) -> str:
        """A rule for this value."""
        match value:
            case str():
                return self.text(value)
            case bool():
                return quoted(self.true if value else self.false)
            case None:
                return quoted(self.null)
            case list():
                parts = [self.literal(each) for each in value]
                return " ".join(['"["', *_joined(parts, self.separator), '"]"'])
            case dict():
                parts = [f"{self.key(name)} {self.literal(each)}" for name, each in value.items()]
                return " ".join(['"{"', *_joined(parts, self.separator), '"}"'])
        return quoted(json.dumps(value))

    @abstractmethod
    def string(self, schema: Schema, path: Path) -> str:
        """A rule for a string that the schema allows."""

    @abstractmethod
    def text(self, value: str) -> str:
        """A rule for this string."""

    @abstractmethod
    def key(self, name: str) -> str:
        """A rule for a member's name, and the separator before its value."""

    @abstractmethod
    def any_key(self) -> str:
        """A rule for any member's name, and the separator before its value."""


class PythonArguments(_Literals):
    """Arguments as in a call in Python: key=value, …"""

    true, false, null = "True", "False", "None"
    separator, pair = ", ", "="

    def string(self, schema: Schema, path: Path) -> str:
        """A string in any quotes; if it has a pattern, in JSON's, which are also Python's."""
        if not schema.keys().isdisjoint(_PATTERNS):
            known = {key: value for key, value in schema.items() if key in OF_TEXTS | _PATTERNS}
            return json_rule(known, self.is_strict, escapes='"\\nrt')
        self.check(schema, OF_TEXTS, path)
        single, double = (_QUOTED.format(quote=quote, times=times(schema)) for quote in "'\"")
        return self.lark.new("STRING", f"/{single}|{double}/")

    def text(self, value: str) -> str:
        double = json.dumps(value, ensure_ascii=False)
        single = double[1:-1].replace('\\"', '"').replace("'", "\\'")
        return either(quoted(double), quoted(f"'{single}'"))

    def key(self, name: str) -> str:
        return f'{self.text(name)} ": "'

    def any_key(self) -> str:
        return f'{self.string({}, ())} ": "'


class GemmaArguments(_Literals):
    """Arguments as Gemma 4 writes them: key:value,…"""

    true, false, null = "true", "false", "null"
    separator, pair = ",", ":"

    def string(self, schema: Schema, path: Path) -> str:
        self.check(schema, OF_TEXTS, path)
        text = self.raw(f"/(?s:.){times(schema)}/", GEMMA_QUOTE)
        return f"{self.lark.literal(GEMMA_QUOTE)} {text}"

    def text(self, value: str) -> str:
        quote = self.lark.literal(GEMMA_QUOTE)
        return f"{quote} {quoted(value)} {quote}"

    def key(self, name: str) -> str:
        return f'{quoted(name) if _BARE_KEY.fullmatch(name) else self.text(name)} ":"'

    def any_key(self) -> str:
        return f'{self.lark.rule("KEY", f"/{_BARE_KEY.pattern}/")} ":"'


def _type_shown(schema: Schema) -> str:
    """The type of a schema that does not name one, inferred from its keywords."""
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema else ""


def _joined(parts: Iterable[str], separator: str) -> Iterator[str]:
    for number, part in enumerate(parts):
        if number:
            yield quoted(separator)
        yield part
