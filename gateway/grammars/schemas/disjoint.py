"""Whether schemas exclude each other, so that `oneOf` is the same as `anyOf`. Compares types,
constants and the properties of objects; in doubt, schemas may overlap."""

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

_MAX_DEPTH = 8  # of schemas within one another that are compared
_TYPE_OF = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
_TYPES = frozenset({"null", "object", *_TYPE_OF.values()})

Follow = Callable[[Any], Any]


def are_disjoint(schemas: Sequence[Any], required: Sequence[str], follow: Follow) -> bool:
    """Whether no value fits two of the schemas. `required`: properties that the schema around them
    requires. `follow` returns the schema that a reference names."""
    listed = [_values(schema) if isinstance(schema, dict) else None for schema in schemas]
    sets = [values for values in listed if values is not None]
    if len(sets) == len(schemas):  # soon done, however many
        return len(set[str]().union(*sets)) == sum(map(len, sets))
    return all(_are_disjoint(a, b, required, follow, 0) for a, b in combinations(schemas, 2))


def _are_disjoint(a: Any, b: Any, required: Sequence[str], follow: Follow, depth: int) -> bool:
    a, b = follow(a), follow(b)
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict) or depth > _MAX_DEPTH:
        return False
    for one, other in ((a, b), (b, a)):
        for keyword in ("anyOf", "oneOf"):
            options = one.get(keyword)
            if isinstance(options, list) and options:
                names = [*required, *_names(one.get("required"))]
                if all(_are_disjoint(each, other, names, follow, depth + 1) for each in options):
                    return True
        if any(
            _are_disjoint(each, other, required, follow, depth + 1)
            for each in _list(one.get("allOf"))
        ):
            return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None and not values & others:
        return True
    types = _types(a) & _types(b)
    return not types or (types == {"object"} and _differ(a, b, required, follow, depth))


def _differ(
    a: dict[str, Any], b: dict[str, Any], required: Sequence[str], follow: Follow, depth: int
) -> bool:
    """Whether a property that is always present has disjoint values in the two schemas."""
    names = {*required, *_names(a.get("required")), *_names(b.get("required"))}
    return any(
        _are_disjoint(_property(a, name), _property(b, name), (), follow, depth + 1)
        for name in names
    )


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Types of the values that a schema allows. An integer is a number."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    found = _TYPES
    if isinstance(values, list):
        found = frozenset(map(_type, values))
    named = schema.get("type", [])
    named = [named] if isinstance(named, str) else named
    if isinstance(named, list) and named:
        found &= {"number" if name == "integer" else name for name in named}
    return found


def _type(value: Any) -> str:
    return "null" if value is None else _TYPE_OF.get(type(value), "object")


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The only values that a schema allows, as text, if it lists them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    return {json.dumps(_canonical(value), sort_keys=True) for value in values}


def _canonical(value: Any) -> Any:
    """Returns equal values for those that JSON Schema calls equal: 1.0 is 1."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_canonical(each) for each in value]
        case dict():
            return {name: _canonical(each) for name, each in value.items()}
    return value


def _names(value: Any) -> list[str]:
    return [name for name in _list(value) if isinstance(name, str)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
