"""A schema as llguidance gets it, and how its parts are found."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.openai.json_schemas.refusals import Path, Schema

_SEARCH_S = 0.3  # of processor time, for the place of a fault


class Prepared:
    """The schema, whose references lead to `$defs`, and where its parts stood."""

    def __init__(self, schema: Schema, places: Mapping[int, Path]) -> None:
        self.schema = schema
        self._places = places

    def place_of(self, part: Schema) -> Path:
        """The path to a part, in the schema that the caller sent."""
        return self._places.get(id(part), ())

    def innermost(self, is_faulty: Callable[[Schema], bool]) -> Schema:
        """The innermost part that is faulty by itself, as far as there is time."""
        definitions = {"$defs": self.schema.get("$defs", {})}
        inner: Schema | None = self.schema
        found = self.schema
        until = time.process_time() + _SEARCH_S
        while inner is not None and time.process_time() < until:
            found = inner
            parts = [part for _, _, part in parts_of(found) if isinstance(part, dict)]
            inner = next((part for part in parts if is_faulty(part | definitions)), None)
        return found


def parts_of(schema: Schema, needed: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """The schemas directly within one, each with what holds it and its key there. `needed`: those
    that a value may not go without."""
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
