"""A schema as it is passed to llguidance, with ways to find its parts."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.grammars.schemas.refusals import FaultOf, Path, Schema

_SEARCH_S = 0.3  # of processor time, for the place of a fault
_EMPTY = "Unsatisfiable"  # how llguidance begins to say that a schema has no value


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
