"""What llguidance can enforce of the names of an object's properties, and of their number."""

from collections.abc import Callable
from typing import Any

from gateway.grammars.schemas.refusals import Checks, Path, Schema
from gateway.grammars.schemas.strings import without

Follow = Callable[[Any], Any]  # the schema that a reference names

_NOTHING = frozenset({"type", "title", "description", "$comment"})


def enforced_names(schema: Schema, checks: Checks, path: Path, follow: Follow) -> Schema:
    """Returns the schema with what can be enforced. Raises SchemaRefused."""
    kept = _of_property_names(schema, checks, path, follow)
    kept = _of_patterns(kept, checks, path)
    return _counted(kept, checks, path)


def _of_property_names(schema: Schema, checks: Checks, path: Path, follow: Follow) -> Schema:
    """Writes `propertyNames` as `properties` or `patternProperties`, if nothing else names any."""
    if "propertyNames" not in schema:
        return schema
    kept = without(schema, "propertyNames")
    names = follow(schema["propertyNames"])
    if names is True or (isinstance(names, dict) and _takes_strings(names)):
        return kept
    others, rest = kept.get("additionalProperties", True), {"additionalProperties": False}
    is_free = not kept.get("properties") and not kept.get("patternProperties")
    if is_free and isinstance(names, dict):
        keywords = names.keys() - _NOTHING
        listed = names.get("enum", [names.get("const")])
        if keywords <= {"enum", "const"} and isinstance(listed, list):
            texts = [name for name in listed if isinstance(name, str)]
            return {**kept, "properties": dict.fromkeys(texts, others), **rest}
        if keywords == {"pattern"}:
            return {**kept, "patternProperties": {names["pattern"]: others}, **rest}
    checks.drop("propertyNames", path)
    return kept


def _takes_strings(names: Schema) -> bool:
    return names.keys() <= _NOTHING and names.get("type", "string") == "string"


def _of_patterns(schema: Schema, checks: Checks, path: Path) -> Schema:
    """Keeps patterns that llguidance accepts and that do not overlap."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return schema
    kept: dict[str, Any] = {}
    others = schema.get("additionalProperties", True)
    for pattern, each in patterns.items():
        probe = {"type": "object", "patternProperties": dict.fromkeys((*kept, pattern), True)}
        if fault := checks.fault_of(probe):
            checks.drop("patternProperties", (*path, "patternProperties", pattern), fault)
            others = each if others is False else others
        else:
            kept[pattern] = each
    found = {**schema, "patternProperties": kept}
    if others is not schema.get("additionalProperties", True):
        found["additionalProperties"] = others
    return _folded(found, checks) if others is False else found


def _folded(schema: Schema, checks: Checks) -> Schema:
    """Removes patterns that match no name but those of properties, because llguidance would still
    demand another name. The properties take over what the patterns demand of them."""
    properties = dict(schema.get("properties") or {})
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    names = list(dict.fromkeys([*properties, *required]))
    kept = dict(schema["patternProperties"])
    for pattern, each in schema["patternProperties"].items():
        matching = [name for name in names if _matches(pattern, name, checks)]
        if not matching or not _is_used_up(pattern, matching, checks):
            continue
        del kept[pattern]
        for name in matching:
            properties[name] = {"allOf": [properties.get(name, True), each]}
    return {**schema, "properties": properties, "patternProperties": kept}


def _matches(pattern: str, name: str, checks: Checks) -> bool:
    return not checks.fault_of({"type": "string", "pattern": pattern, "enum": [name]})


def _is_used_up(pattern: str, names: list[str], checks: Checks) -> bool:
    """Whether a pattern matches no other name: then an object with one more name has no output."""
    one_more = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": names,
        "patternProperties": {pattern: {"type": "null"}},
        "additionalProperties": False,
        "minProperties": len(names) + 1,
    }
    return bool(checks.fault_of(one_more))


def _counted(schema: Schema, checks: Checks, path: Path) -> Schema:
    """Removes counts of properties that cannot be enforced. llguidance counts if all named
    properties are required, or if a single one decides. A name may be repeated, so of other
    properties only one is certain."""
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    required = set(schema.get("required") or ())
    decides_one = (
        least <= 1
        and most in (None, 1)
        and schema.get("additionalProperties") is False
        and not schema.get("patternProperties")
    )
    if (schema.get("properties") or {}).keys() <= required or decides_one:
        if least > len(required) + 1:
            checks.drop("minProperties", path, "a name may come twice")
        return schema
    for keyword in schema.keys() & {"minProperties", "maxProperties"}:
        checks.drop(keyword, path, "the object has optional properties")
    return without(schema, "minProperties", "maxProperties")
