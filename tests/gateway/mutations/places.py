"""Places in a body that a mutation may change."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.gateway.mutations.values import FREE


@dataclass(frozen=True, slots=True)
class Place:
    """A value, or a name in an object with free names; `put` replaces it."""

    owner: Any
    at: Any
    is_name: bool
    is_free: bool  # it is a text that a caller may choose

    @property
    def value(self) -> Any:
        return self.at if self.is_name else self.owner[self.at]

    def put(self, value: Any) -> None:
        if self.is_name:
            self.owner[value if isinstance(value, str) else "x"] = self.owner.pop(self.at)
        else:
            self.owner[self.at] = value


def places_of(node: Any, name: str = "") -> Iterator[Place]:
    """All values below a node, and the names of metadata."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node))
    for at, value in items:
        inner = str(at) if isinstance(node, dict) and name != "metadata" else name
        yield Place(node, at, False, isinstance(value, str) and inner in FREE)
        if name == "metadata":
            yield Place(node, at, True, True)
        if isinstance(value, dict | list):
            yield from places_of(value, inner)


def objects_of(node: Any) -> Iterator[dict[str, Any]]:
    return (p.value for p in places_of(node) if not p.is_name and isinstance(p.value, dict))
