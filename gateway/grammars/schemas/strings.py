"""What llguidance can enforce of a string's pattern, format and length, and of the names and number
of an object's properties.

Its regular expressions have no look-around, back references or word boundaries. A pattern without
them allows more, but still enforces the rest.
"""

from collections.abc import Callable, Iterator
from typing import Any

from gateway.grammars.schemas.refusals import Checks, Path, Schema

MAX_LENGTH = 10_000  # a counted character takes some nine of a lexer's states

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        "uuid",
    }
)
# Others, such as int32 or password, are none of JSON Schema's and say nothing.
_UNENFORCED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
_KEYWORDS = ("pattern", "format", "minLength", "maxLength")

Follow = Callable[[Any], Any]  # the schema that a reference names

_NOTHING = frozenset({"type", "title", "description", "$comment"})


def enforced_string(schema: Schema, checks: Checks, path: Path) -> Schema:
    """Returns the schema with what can be enforced of a string. Lengths are counts. Raises
    GrammarRefused."""
    kept = _bounded(schema, checks, path)
    if isinstance(name := kept.get("format"), str) and name not in FORMATS:
        if name in _UNENFORCED_FORMATS:
            checks.drop("format", path, f"no grammar knows {name}")
        kept = without(kept, "format")
    part = {keyword: kept[keyword] for keyword in _KEYWORDS if keyword in kept}
    if len(part) < 2 and "pattern" not in part:
        return kept
    fault = checks.fault_of({"type": "string", **part})
    if not fault or (fault.startswith("Unsatisfiable") and checks.is_strict):
        return kept
    checks.drop("pattern" if "pattern" in part else "format", path, fault)
    for weaker in _weaker(part):
        if not checks.fault_of({"type": "string", **weaker}):
            return {**without(kept, *_KEYWORDS), **weaker}
    return kept


def without(schema: Schema, *keywords: str) -> Schema:
    return {keyword: each for keyword, each in schema.items() if keyword not in keywords}


def _bounded(schema: Schema, checks: Checks, path: Path) -> Schema:
    """Limits a strict string to the greatest length that can be counted."""
    kept = schema
    if kept.get("minLength", 0) > MAX_LENGTH:
        checks.drop("minLength", path, f"it is over {MAX_LENGTH:,}")
        kept = without(kept, "minLength")
    if kept.get("maxLength", 0) > MAX_LENGTH:
        kept = {**kept, "maxLength": MAX_LENGTH} if checks.is_strict else without(kept, "maxLength")
    return kept


def _weaker(part: Schema) -> Iterator[Schema]:
    """Yields replacements for a schema that makes no grammar, the strictest first."""
    pattern = part.get("pattern")
    if isinstance(pattern, str) and (rest := without_assertions(pattern)) != pattern:
        yield {**part, "pattern": rest}
        yield {**without(part, "format"), "pattern": rest}
    yield without(part, "format")
    yield without(part, "pattern")
    yield without(part, "pattern", "format")


def without_assertions(pattern: str) -> str:
    """A pattern without its look-around and word boundaries, which only narrow what it allows."""
    kept: list[str] = []
    at = 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "[":
            end = _end_of_class(pattern, at)
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            end = _end_of_group(pattern, at)
            at = end
            continue
        elif pattern[at] == "\\":
            end = at + 2
            if pattern[at + 1 : end] in ("b", "B"):
                at = end
                continue
        kept.append(pattern[at:end])
        at = end
    return "".join(kept)


def _end_of_group(pattern: str, at: int) -> int:
    """The index after the parenthesis that closes the one at `at`."""
    depth = 0
    while at < len(pattern):
        match pattern[at]:
            case "(":
                depth += 1
            case ")":
                depth -= 1
                if not depth:
                    return at + 1
            case "[":
                at = _end_of_class(pattern, at) - 1
            case "\\":
                at += 1
        at += 1
    return at


def _end_of_class(pattern: str, at: int) -> int:
    """The index after the bracket that closes the one at `at`."""
    at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def enforced_names(schema: Schema, checks: Checks, path: Path, follow: Follow) -> Schema:
    """Returns the schema with what can be enforced. Raises GrammarRefused."""
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
