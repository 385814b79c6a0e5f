"""Rules for the arguments of calls in syntaxes other than JSON, as the JSON schema of a function's
parameters demands. Properties are written in the schema's order. The schema was checked before.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from contract.output_formats import GEMMA_QUOTE
from gateway.grammars.rules.lark import ANY_TEXT, Lark, either, json_rule, quoted
from gateway.grammars.schemas.refusals import GrammarRefused, Path

Schema = Mapping[str, Any]


def string_parameters(schema: Schema) -> dict[str, tuple[str, ...]]:
    """The properties that may be strings, each with what else it may be: types, or values as JSON.
    One that may be anything is left out."""
    properties = schema.get("properties")
    kinds = _Kinds(schema)
    given = properties.items() if isinstance(properties, dict) else ()
    found = {name: kinds.of(each) or frozenset() for name, each in given}
    return {
        name: tuple(sorted(allowed - {"string"}))
        for name, allowed in found.items()
        if "string" in allowed
    }


_MAX_KINDS = 64  # alternatives, or values, of one schema that are looked at
_MAX_NESTED = 32


class _Kinds:
    """What the schemas of one document allow: types, and values other than strings as JSON; None:
    anything."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._references: dict[str, Any] = {}
        self._known: dict[int, frozenset[str] | None] = {}  # by the schema's id

    def of(self, schema: Any, depth: int = 0) -> frozenset[str] | None:
        schema = resolved(schema, self._root, self._references)
        if not isinstance(schema, dict) or depth > _MAX_NESTED:
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()  # what a schema adds to itself
            self._known[id(schema)] = self._named(schema, depth + 1)
        return self._known[id(schema)]

    def _named(self, schema: Schema, depth: int) -> frozenset[str] | None:
        types = [each for each in _listed(schema.get("type", [])) if isinstance(each, str)]
        keyword = next((each for each in _PARTS if each in schema), "")
        parts = schema.get(keyword)
        if (values := choices_of(schema)) is not None and types != ["string"]:
            named = ["string" if isinstance(each, str) else json.dumps(each) for each in values]
        elif types:
            named = [each for each in types if each != "boolean"]
            named += ["true", "false"] if "boolean" in types else []
        elif isinstance(parts, list) and len(parts) <= _MAX_KINDS:
            allowed = [self.of(part, depth) for part in parts]
            sets = [each for each in allowed if each is not None]
            if keyword == "allOf":
                return frozenset.intersection(*sets) if sets else None
            return frozenset().union(*sets) if sets == allowed else None
        else:
            return None
        return frozenset(named) if len(named) <= _MAX_KINDS else None


_PARTS = ("anyOf", "oneOf", "allOf")


def _listed(types: Any) -> Sequence[Any]:
    return types if isinstance(types, list) else [types]


def resolved(schema: Any, root: Schema, known: dict[str, Any] | None = None) -> Any:
    """Returns what a schema refers to within the document, or the schema if it refers to nothing.
    None if the reference leads nowhere. `known`: where references lead, so that each is followed
    once."""
    known = {} if known is None else known
    names: list[str] = []
    while isinstance(schema, dict) and isinstance(name := schema.get("$ref"), str):
        if name in known:
            schema = known[name]
            break
        known[name] = None  # what a reference to itself leads to
        names.append(name)
        schema = root if name == "#" or name.startswith("#/") else None
        for part in name.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, dict) else None
    known |= dict.fromkeys(names, schema)
    return schema


_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions", "contentMediaType", "nullable"),
    }
)
OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
OF_TEXTS = frozenset({"type", "minLength", "maxLength"})
OF_CHOICES = frozenset({"type", "enum", "const"})

_STRING_TYPES = ("string", "true")
_OTHER_TYPES = ("number", "integer", "boolean", "null", "array", "object", "false")


class Arguments:
    """The arguments of one function."""

    def __init__(self, lark: Lark, name: str, schema: Schema, is_strict: bool) -> None:
        """`name` is that of the function's rule."""
        self.lark, self.name = lark, name
        self.root, self.is_strict = schema, is_strict

    def parameters(self) -> Schema:
        """The schema of the arguments as a whole."""
        schema = resolved(self.root, self.root) or {}
        self.check(schema, OF_OBJECTS, ())
        return schema

    def takes_any(self, schema: Schema) -> bool:
        """Whether an object of the schema may have any members."""
        names = self.properties(schema)
        return not names and schema.get("additionalProperties") is not False

    def check(self, schema: Schema, known: frozenset[str], path: Path) -> None:
        """Raises GrammarRefused for a keyword of a strict function that nothing enforces."""
        for keyword in schema if self.is_strict else ():
            if keyword not in known | _ANNOTATIONS and not keyword.startswith("x-"):
                message = f"{keyword} cannot be forced in the format of the model's calls"
                raise GrammarRefused(message, (*path, keyword))

    def properties(self, schema: Schema) -> list[tuple[str, Any, bool]]:
        """Returns the name and schema of each property, and whether it is required; then the
        required names without a schema."""
        given, required = schema.get("properties"), schema.get("required")
        properties = given if isinstance(given, dict) else {}
        names = required if isinstance(required, list) else []
        found = [(name, each, name in names) for name, each in properties.items()]
        return found + [(name, True, True) for name in names if name not in properties]

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """A rule for the items in their order; each may be required or optional."""
        if not separator:
            return " ".join(item if is_required else f"({item})?" for item, is_required in items)
        firsts: list[str] = []
        behind = ""
        for item, is_required in reversed(items):
            if is_required:
                firsts.clear()
            firsts.append(f"{item} {behind}")
            more = f"({quoted(separator)} {item}){'' if is_required else '?'} {behind}"
            behind = self.lark.new("more", more)
        whole = either(*firsts) if firsts else ""
        is_needed = any(is_required for _, is_required in items)
        return whole if is_needed or not whole else f"({whole})?"

    def raw(self, terminal: str, close: str) -> str:
        """A rule for text as it is, without the literal `close`, and then that literal."""
        lark = self.lark
        text, mark, rest = lark.split(close)
        spelled = quoted(close.strip())
        body = f"{terminal} & ~({ANY_TEXT} {spelled} {ANY_TEXT})"
        if mark:
            raw = lark.new("RAW", f"({body}) {quoted(text)}" if text else body)
            return f"{raw} {lark.literal(mark + rest)}"
        return lark.new("raw", f"{lark.new('RAW', body)} {quoted(close)}", "[lazy]")


def says_nothing(schema: Any) -> bool:
    """Whether a schema allows anything."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def choices_of(schema: Schema) -> list[Any] | None:
    """The only values that a schema allows, if it lists them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def times(schema: Schema) -> str:
    """The allowed number of characters of a string, as a quantifier of a regular expression."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"


class TagArguments(Arguments):
    """Arguments that are each enclosed in tags: (key_open KEY key_close VALUE value_close)*.
    Strings are written without quotes."""

    def __init__(
        self, lark: Lark, name: str, schema: Schema, is_strict: bool, format_: Mapping[str, Any]
    ) -> None:
        super().__init__(lark, name, schema, is_strict)
        self._format = format_
        self._kinds = _Kinds(schema)

    def whole(self) -> str:
        schema = self.parameters()
        if self.takes_any(schema):
            name = self.lark.rule("KEY", r"/[^<>\n\"]{1,256}/")
            return f"({self._argument(name, True, ())})*"
        items = [
            (self._argument(quoted(name), each, ("properties", name)), is_required)
            for name, each, is_required in self.properties(schema)
        ]
        return self.sequence(items, "")

    def _argument(self, name: str, schema: Any, path: Path) -> str:
        open_, close = self.lark.literal(self._format["key_open"]), self._format["key_close"]
        types = frozenset(_LOOKS).intersection(self._kinds.of(schema) or ())
        values = list(self._values(schema, path, types)) or [(_STRING_TYPES, self._text({}, path))]
        return either(
            *(f"{open_} {name} {self.lark.literal(close, mark)} {value}" for mark, value in values)
        )

    def _values(
        self, schema: Any, path: Path, types: frozenset[str], within: frozenset[int] = frozenset()
    ) -> Iterator[tuple[Sequence[str], str]]:
        """Yields rules for the values that a schema allows, each with its closing mark, and what
        the opening mark may say of them. `types`: what the argument may be beside a string;
        `within`: the ids of the schemas of which this one is a part."""
        value = resolved(schema, self.root)
        if says_nothing(value):
            yield _STRING_TYPES, self._text({}, path, types)
            return
        if not isinstance(value, dict) or "string" not in (self._kinds.of(value) or ()):
            yield _OTHER_TYPES, self._json(schema)
            return
        names = _listed(value.get("type", ()))
        keyword = next((each for each in _PARTS if each in value), "")
        if (choices := choices_of(value)) is not None:
            yield _STRING_TYPES, self._text(value, path)
            rest = [each for each in choices if not isinstance(each, str)]
            if rest and names != ["string"]:
                yield _OTHER_TYPES, self._json({"enum": rest})
        elif "type" in value:
            self.check(value, OF_TEXTS if names == ["string"] else _OF_SEVERAL, path)
            yield _STRING_TYPES, self._text(value, path, types)
            if rest := [each for each in names if each != "string"]:
                yield _OTHER_TYPES, self._json({**value, "type": rest})
        elif keyword != "allOf" or len(value[keyword]) == 1:
            self.check(value, frozenset({keyword}), path)
            for i, part in enumerate(value[keyword] if id(value) not in within else ()):
                place = (*path, keyword, str(i))
                yield from self._values(part, place, types, within | {id(value)})
        else:
            self.check(value, frozenset(), path)
            yield _STRING_TYPES, self._text({}, path, types)

    def _json(self, schema: Schema) -> str:
        defined = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        whole = json_rule({**defined, **schema}, self.is_strict)
        return f"{whole} {self.lark.literal(self._format['value_close'])}"

    def _text(self, schema: Schema, path: Path, types: frozenset[str] = frozenset()) -> str:
        """A rule for strings that are not read as values of the types."""
        close = self._format["value_close"]
        if (choices := choices_of(schema)) is not None:
            self.check(schema, OF_CHOICES, path)
            texts = [quoted(each) for each in choices if isinstance(each, str)]
            return f"{either(*texts)} {self.lark.literal(close)}"
        unlike = "".join(f" & ~/{_LOOKS[each]}/" for each in sorted(types))
        return self.raw(f"/(?s:.){times(schema)}/{unlike}", close)


# Texts that are read as values of a type, where strings are allowed, too.
_LOOKS = {
    "array": r"(?s:\s*\[.*)",
    "object": r"(?s:\s*\{.*)",
    "integer": r"\s*-?[0-9.eE+\-]+\s*",
    "number": r"\s*-?[0-9.eE+\-]+\s*",
}
_OF_ARRAYS = frozenset({"type", "items", "minItems", "maxItems"})
_OF_NUMBERS = frozenset(
    {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_PATTERNS = frozenset({"pattern", "format"})
_OF_SEVERAL = OF_TEXTS | OF_OBJECTS | _OF_ARRAYS | _OF_NUMBERS
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
