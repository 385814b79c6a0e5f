"""What the JSON schema of a function's parameters demands, for syntaxes other than JSON.

Properties are written in the schema's order. The schema was checked before.
"""

from collections.abc import Sequence
from typing import Any

from gateway.grammars.rules.lark import ANY_TEXT, Lark, either, quoted
from gateway.grammars.rules.parameter_types import Schema, resolved

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions", "contentMediaType", "nullable"),
    }
)
OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
OF_TEXTS = frozenset({"type", "minLength", "maxLength"})
OF_CHOICES = frozenset({"type", "enum", "const"})

Path = tuple[str, ...]


class ArgumentsRefused(Exception):
    """The syntax cannot express what a strict schema demands. `path` leads to the part."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


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
        """Raises ArgumentsRefused for a keyword of a strict function that nothing enforces."""
        for keyword in schema if self.is_strict else ():
            if keyword not in known | _ANNOTATIONS and not keyword.startswith("x-"):
                message = f"{keyword} cannot be forced in the format of the model's calls"
                raise ArgumentsRefused(message, (*path, keyword))

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
