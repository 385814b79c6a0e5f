"""Finds what `$ref` refers to within a document. Fetches nothing."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from gateway.grammars.schemas.refusals import Path, Schema

_OLD_DRAFTS = ("/draft-04/", "/draft-06/", "/draft-07/")
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})  # contain no schemas


class Document:
    """A schema and those that it contains, by their names: `$id`, `id` of draft 4, `$anchor`."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # Keywords beside $ref do not count, and prefixItems is unknown.
        self.is_old = any(draft in str(root.get("$schema")) for draft in _OLD_DRAFTS)
        self._bases: dict[Path, str] = {(): ""}  # addresses of parts that have their own
        self._places: dict[str, Path] = {"": ()}  # by address
        for path, part in _parts(root):
            if self.is_old and "$ref" in part:
                continue
            if isinstance(name := part.get("$id", part.get("id")), str):
                base, anchor = urldefrag(_joined(self._base(path), name))
                if anchor:  # as in draft 7
                    self._places.setdefault(f"{base}#{anchor}", path)
                else:
                    self._bases[path] = base
                    self._places.setdefault(base, path)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := part.get(keyword), str):
                    self._places.setdefault(f"{self._base(path)}#{name}", path)

    def find(self, reference: str, path: Path) -> tuple[Path, Any] | None:
        """Returns the place and the schema to which a reference in the schema at `path` leads; None
        if that is in another document. Raises LookupError if this document lacks it."""
        address, fragment = urldefrag(_joined(self._base(path), reference))
        if address not in self._places:
            return None
        if fragment and not fragment.startswith("/"):
            place = self._places[f"{address}#{fragment}"]
            return place, self._at(place)
        keys = tuple(
            unquote(key).replace("~1", "/").replace("~0", "~") for key in fragment.split("/")[1:]
        )
        for start in (self._places[address], ()):  # some tools count from the root despite $id
            try:
                return (*start, *keys), self._at((*start, *keys))
            except (LookupError, TypeError, ValueError):
                continue
        raise LookupError(reference)

    def _base(self, path: Path) -> str:
        """The address of the document around a place, to which references there are relative."""
        return next(
            self._bases[path[:length]]
            for length in range(len(path), -1, -1)
            if path[:length] in self._bases
        )

    def _at(self, path: Path) -> Any:
        part: Any = self._root
        for key in path:
            part = part[int(key)] if isinstance(part, list) else part[key]
        return part


def _parts(root: Schema) -> Iterator[tuple[Path, Schema]]:
    """Every object of a document that may be a schema, outer ones first."""
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, dict):
            yield path, part
            waiting += [((*path, k), each) for k, each in part.items() if k not in _VALUES]
        elif isinstance(part, list):
            waiting += [((*path, str(i)), each) for i, each in enumerate(part)]


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:  # not an address
        return reference
