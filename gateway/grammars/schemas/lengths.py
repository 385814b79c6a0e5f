"""A schema as it is passed to llguidance: its parts, and the least length of its outputs. Expects
schemas as preparation.py makes them."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.grammars.schemas.refusals import FaultOf, GrammarRefused, Path, Schema

_SEARCH_S = 0.3  # of processor time, for the place of a fault
_EMPTY = "Unsatisfiable"  # how llguidance begins to say that a schema has no value

MAX_CHARS = 1_000_000  # more than a context holds
_SHORTEST = {"null": 4.0, "boolean": 4.0}  # of other types 1


class Prepared:
    """The schema, whose references lead to `$defs`, and the original places of its parts."""

    def __init__(self, schema: Schema, places: Mapping[int, Path]) -> None:
        self.schema = schema
        self._places = places

    def place_of(self, part: Schema) -> Path:
        """The path to a part, in the schema that the caller sent."""
        return self._places.get(id(part), ())

    def innermost(self, fault: str, fault_of: FaultOf) -> tuple[Schema, str]:
        """Returns the innermost part that has a fault by itself, and the fault, within a time
        limit. If a schema has no value, a part within may have another fault, which explains it."""
        definitions = self.schema.get("$defs", {})
        part, is_empty = self.schema, fault.startswith(_EMPTY)
        until = time.process_time() + _SEARCH_S
        while time.process_time() < until:
            inner = [each for _, _, each in parts_of(part, needed=is_empty)]
            inner += [definitions[name_of(part)]] if "$ref" in part else []
            for each in filter(lambda each: isinstance(each, dict) and each is not part, inner):
                found = fault_of(each | {"$defs": definitions})
                if found == fault or (is_empty and found.startswith(_EMPTY)):
                    part, fault = each, found
                    break
            else:
                break
        return part, fault


def parts_of(schema: Schema, needed: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the schemas directly within one, each with its container and its key there. `needed`:
    only those that every value needs."""
    for keyword in ("allOf", "anyOf", "prefixItems"):
        holder = schema.get(keyword, [])
        yield from ((holder, i, each) for i, each in enumerate(holder))
    for keyword in ("properties", "patternProperties", "$defs"):
        holder = schema.get(keyword, {})
        names = [n for n in holder if not needed or n in schema.get("required", ())]
        yield from ((holder, name, holder[name]) for name in names)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield schema, keyword, schema[keyword]


def name_of(schema: Schema) -> str:
    """The name of the definition to which a schema refers."""
    return str(schema["$ref"]).rpartition("/")[2]


def check_lengths(prepared: Prepared) -> None:
    """Removes the parts of a schema whose values never end, because each would contain another one.
    Raises GrammarRefused if the whole schema has no value, or only values that are too long."""
    root = prepared.schema
    lengths = _Lengths(root)
    if lengths.has_endless:
        lengths.cut(root, nullable=True)
        lengths = _Lengths(root)
    shortest = lengths.of(root)
    if shortest > MAX_CHARS:
        what = "would contain another one, without end"
        if shortest < math.inf:
            what = f"has over {MAX_CHARS:,} characters"
        place = prepared.place_of(lengths.longest(root))
        raise GrammarRefused(f"each value of this schema {what}", place)
    if lengths.has_endless:
        lengths.cut(root)


class _Lengths:
    """Least lengths of a schema and its definitions. All definitions start as endless; the lengths
    are computed again until none gets shorter."""

    def __init__(self, root: Schema) -> None:
        self._definitions: Schema = root.get("$defs", {})
        self._known = dict.fromkeys(self._definitions, math.inf)
        is_new = True
        while is_new:
            found = {name: self.of(schema) for name, schema in self._definitions.items()}
            is_new = found != self._known
            self._known = found

    @property
    def has_endless(self) -> bool:
        return math.inf in self._known.values()

    def of(self, schema: Any) -> float:
        """The least length in characters; math.inf for a schema whose values never end."""
        if not isinstance(schema, dict):
            return 1
        parts = [self._own(schema), *map(self.of, schema.get("allOf", ()))]
        if "$ref" in schema:
            parts.append(self._known[name_of(schema)])
        if schema.get("anyOf"):
            parts.append(min(map(self.of, schema["anyOf"])))
        return max(parts)

    def longest(self, schema: Schema) -> Schema:
        """The innermost part that is too long by itself; stops at a schema that contains itself."""
        seen: list[Schema] = []
        while not any(schema is each for each in seen):
            seen.append(schema)
            parts = [each for _, _, each in parts_of(schema, needed=True)]
            parts += [self._definitions[name_of(schema)]] if "$ref" in schema else []
            schema = next((each for each in parts if self.of(each) > MAX_CHARS), schema)
        return seen[-1]

    def cut(self, schema: Schema, nullable: bool = False) -> None:
        """Replaces each part whose values never end by one that allows nothing. `nullable`:
        replaces only parts that are nullable, by ones that allow null alone."""
        for holder, key, part in parts_of(schema):
            if self.of(part) == math.inf and (not nullable or part.get("nullable") is True):
                holder[key] = {"type": "null"} if nullable else False
            elif isinstance(part, dict):
                self.cut(part, nullable)

    def _own(self, schema: Schema) -> float:
        """The length that the schema's own keywords demand."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            return min(len(json.dumps(each, ensure_ascii=False)) for each in values)
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        return min((self._of_type(str(each), schema) for each in types), default=1)

    def _of_type(self, type_: str, schema: Schema) -> float:
        match type_:
            case "string":
                return 2 + float(schema.get("minLength", 0))
            case "array":
                num = int(schema.get("minItems", 0))
                first = [self.of(each) for each in schema.get("prefixItems", ())[:num]]
                rest = (num - len(first)) * self.of(schema.get("items")) if num > len(first) else 0
                return 2 + sum(first) + rest + 2 * max(num - 1, 0)
            case "object":
                names = set(schema.get("required", ()))
                others = max(int(schema.get("minProperties", 0)) - len(names), 0)
                return (
                    2 + 5 * others + sum(len(n) + 4 + self._of_property(schema, n) for n in names)
                )
        return _SHORTEST.get(type_, 1)

    def _of_property(self, schema: Schema, name: str) -> float:
        if name in (properties := schema.get("properties", {})):
            return self.of(properties[name])
        return 1 if schema.get("patternProperties") else self.of(schema.get("additionalProperties"))
