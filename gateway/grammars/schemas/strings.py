"""What llguidance can enforce of a string's pattern, format and length.

Its regular expressions have no look-around, back references or word boundaries. A pattern without
them allows more, but still enforces the rest.
"""

from collections.abc import Iterator

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


def enforced_string(schema: Schema, checks: Checks, path: Path) -> Schema:
    """Returns the schema with what can be enforced of a string. Lengths are counts. Raises
    SchemaRefused."""
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
