"""Which parameters of a function are strings, according to the JSON schema of its parameters. Some
models write strings without quotes."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def string_parameters(schema: Schema) -> tuple[str, ...]:
    """The names of the properties that are always strings."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ()
    return tuple(name for name, each in properties.items() if is_string(resolved(each, schema)))


def is_string(schema: Any) -> bool:
    """Whether a schema, which refers to no other, allows nothing but strings."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


def resolved(schema: Any, root: Schema) -> Any:
    """Returns what a schema refers to within the document, or the schema if it refers to nothing.
    None if the reference leads nowhere."""
    seen: set[str] = set()
    while isinstance(schema, dict) and isinstance(name := schema.get("$ref"), str):
        if name in seen or not (name == "#" or name.startswith("#/")):
            return None
        seen.add(name)
        schema = root
        for part in name.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema
