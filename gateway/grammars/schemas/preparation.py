"""Reduces a caller's JSON schema to what llguidance enforces.

Keywords that say nothing about values are removed, and referenced schemas move to `$defs`. What no
grammar can enforce is dropped, or refused if the schema is strict. Forms of older drafts become
those of draft 2020-12. Numbers, strings, names and `oneOf` have modules of their own. Nothing is
fetched.
"""

import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from gateway.grammars.schemas import numbers
from gateway.grammars.schemas.disjoint import are_disjoint
from gateway.grammars.schemas.lengths import Prepared
from gateway.grammars.schemas.refusals import (
    Checks,
    FaultOf,
    GrammarRefused,
    Path,
    Schema,
    Unenforceable,
)
from gateway.grammars.schemas.strings import enforced_names, enforced_string, without

_OLD_DRAFTS = ("/draft-04/", "/draft-06/", "/draft-07/")
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})  # contain no schemas

_STEP = "multipleOf"
_COUNTS = [f"{end}{what}" for what in ("Items", "Length", "Properties") for end in ("min", "max")]
_OF_TYPE = {
    "number": (*numbers.BOUNDS, _STEP),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    ),
}
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties"})
_SINGLE = frozenset({"items", "additionalProperties"})
_PLAIN = frozenset({"type", "enum", "const", "required", "minimum", "maximum", _STEP}) | {
    *_COUNTS,
    *("pattern", "format", "nullable"),
}
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
# Others, such as `then` and `minContains`, do nothing without these.
_UNENFORCED = frozenset(
    {
        *("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
_UNREACHABLE = 10_000_000  # characters or items: no output has as many
_MAX_DEPTH = 32  # of references to references


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


def prepare(schema: Schema, is_strict: bool, fault_of: FaultOf) -> Prepared:
    """Raises GrammarRefused."""
    try:
        return _Preparation(schema, Checks(fault_of, is_strict)).whole()
    except RecursionError:
        raise GrammarRefused("the schema is nested too deeply", ()) from None


class _Preparation:
    """The preparation of one schema and all that it contains."""

    def __init__(self, root: Schema, checks: Checks) -> None:
        self._root = root
        self._checks = checks
        self._document = Document(root)
        self._names: dict[Path, str] = {}  # of referenced schemas, in `$defs`
        self._waiting: list[tuple[Path, Any]] = []
        self._places: dict[int, Path] = {}

    def whole(self) -> Prepared:
        root = self._schema(self._root, ())
        assert isinstance(root, dict), "it was one"
        definitions: Schema = {}
        while self._waiting:
            path, schema = self._waiting.pop()
            definitions[self._names[path]] = self._schema(schema, path)
        if () in self._names:  # it contains itself
            definitions[self._names[()]] = root
            root = {"$ref": self._pointer(())}
        return Prepared(root | {"$defs": definitions} if definitions else root, self._places)

    def _schema(self, schema: Any, path: Path) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarRefused("a schema must be an object or a boolean", path)
        given = self._simplified(schema, path)
        kept: Schema = {}
        for keyword, each in given.items():
            self._keep(kept, keyword, each, path, (*path, _name_in(schema, keyword, each)))
        self._places[id(kept)] = path
        return kept

    def _keep(self, kept: Schema, keyword: str, value: Any, path: Path, place: Path) -> None:
        """Keeps a keyword, with the schemas that it contains. `place`: of the value."""
        if keyword in _LISTS:
            parts = [self._schema(each, (*place, str(i))) for i, each in enumerate(value)]
            name = "anyOf" if keyword == "oneOf" else keyword
            if name == "anyOf" and name in kept:  # the schema had both
                name, parts = "allOf", [{name: parts}]
            kept[name] = [*kept.get(name, []), *parts]
        elif keyword in _MAPS:
            kept[keyword] = {n: self._schema(each, (*place, n)) for n, each in value.items()}
        elif keyword in _SINGLE:
            kept[keyword] = self._schema(value, place)
        elif keyword == "$ref":
            self._refer(kept, value, path)
        elif keyword in _PLAIN:
            kept[keyword] = value

    def _refer(self, kept: Schema, reference: Any, path: Path) -> None:
        if not isinstance(reference, str):
            raise GrammarRefused("$ref must be a string", path)
        try:
            found = self._document.find(reference, path)
        except LookupError:
            raise GrammarRefused(f"$ref names nothing: {reference[:80]}", path) from None
        if found is None:
            self._checks.drop("$ref", path, "it names another document")
            return
        place, schema = found
        if place not in self._names:
            self._names[place] = str(len(self._names))
            self._waiting += [(place, schema)] if place else []  # the root is being prepared
        kept["$ref"] = self._pointer(place)

    def _pointer(self, place: Path) -> str:
        return f"#/$defs/{self._names[place]}"

    def _follow(self, schema: Any) -> Any:
        """What a schema refers to, or itself. True, which allows anything, if that is unknown."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            try:
                found = self._document.find(str(schema["$ref"]), ())
            except LookupError:
                return True
            schema = True if found is None else found[1]
        return True

    def _simplified(self, schema: Schema, path: Path) -> Schema:
        """Returns the schema with keywords that can be enforced. Its parts are not yet prepared."""
        # Clients write null for unset keywords.
        given = {k: v for k, v in schema.items() if v is not None or k == "const"}
        if self._document.is_old and "$ref" in given:
            given = {"$ref": given["$ref"]}
        given = self._of_draft_2020(given, path)
        _check_forms(given, path)
        named = given.get("type", [])
        types = [named] if isinstance(named, str) else named
        if isinstance(types, list) and types:
            others = _OF_TYPE.keys() - {"number" if each == "integer" else each for each in types}
            given = without(given, *(keyword for other in others for keyword in _OF_TYPE[other]))
        given = self._without_unenforced(given, path)
        given = self._with_constants(given, path)
        given = self._with_numbers(given, "integer" in types and "number" not in types, path)
        given = enforced_string(given, self._checks, path)
        given = enforced_names(given, self._checks, path, self._follow)
        options = given.get("oneOf")
        if options and not are_disjoint(options, given.get("required", ()), self._follow):
            self._checks.drop("oneOf", path, "a value may fit two of its schemas; use anyOf")
        return given

    def _of_draft_2020(self, schema: Schema, path: Path) -> Schema:
        given = without(
            schema, "additionalItems", *(["prefixItems"] if self._document.is_old else [])
        )
        if isinstance(given.get("items"), list):
            given["prefixItems"] = given.pop("items")
            if (others := schema.get("additionalItems")) is not None:
                given["items"] = others
        if isinstance(given.get("required"), bool):
            self._checks.drop("required", path, "it must be a list")
            del given["required"]
        return given

    def _without_unenforced(self, schema: Schema, path: Path) -> Schema:
        given = _with_unevaluated(schema)
        for keyword in given.keys() & _UNENFORCED:
            if given[keyword] != {} or keyword in ("not", "if"):
                self._checks.drop(keyword, path)
        return given

    def _with_constants(self, schema: Schema, path: Path) -> Schema:
        for keyword in ("enum", "const"):
            if keyword in schema and not _are_exact(schema[keyword]):
                self._checks.drop(keyword, path, "a number has too many digits")
                schema = without(schema, keyword)
        return schema

    def _with_numbers(self, schema: Schema, is_integer: bool, path: Path) -> Schema:
        while True:
            try:
                found: Schema = dict(numbers.bounds(schema, is_integer))
                if _STEP in schema:
                    found[_STEP] = numbers.step(schema[_STEP])
                return {**without(schema, *numbers.BOUNDS, _STEP), **found}
            except Unenforceable as refusal:
                self._checks.drop(refusal.keyword, path, refusal.reason)
                excluding = f"exclusive{refusal.keyword.capitalize()}"
                schema = without(schema, refusal.keyword, excluding)


def _check_forms(schema: Schema, path: Path) -> None:
    """Raises GrammarRefused for a keyword with a value that no draft allows. Counts become
    integers; counts that no output reaches are removed."""
    for keyword, each in list(schema.items()):
        form = ""
        if keyword in _LISTS and not isinstance(each, list):
            form = "a list"
        elif keyword in _MAPS and not isinstance(each, dict):
            form = "an object"
        elif keyword == "required":
            form = "" if _are_strings(each) else "a list of strings"
        elif keyword in (*numbers.BOUNDS, _STEP):
            may_be_bool = keyword.startswith("exclusive")
            form = "" if _is_number(each, may_be_bool) else "a finite number"
            if keyword == _STEP and not form and each <= 0:
                form = "over 0"
        elif keyword in _COUNTS:
            if not _is_number(each) or each != int(each) or each < 0:
                form = "a whole number"
            elif each >= _UNREACHABLE if keyword.startswith("max") else not each:
                del schema[keyword]
            else:
                schema[keyword] = int(each)
        if form:
            raise GrammarRefused(f"{keyword} must be {form}", path)


def _name_in(schema: Schema, keyword: str, value: Any) -> str:
    """The keyword of a value as the caller wrote it: older drafts have other names for some."""
    if schema.get(keyword) is value:
        return keyword
    return next((name for name, each in schema.items() if each is value), keyword)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_number(value: Any, may_be_bool: bool = False) -> bool:
    if isinstance(value, bool):
        return may_be_bool
    return isinstance(value, int | float) and math.isfinite(value)


def _are_exact(value: Any) -> bool:
    """Whether llguidance writes the numbers of a constant unchanged."""
    if isinstance(value, list | dict):
        return all(map(_are_exact, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool) or not isinstance(value, int | float) or numbers.is_exact(value)


def _with_unevaluated(schema: Schema) -> Schema:
    """Replaces `unevaluated…` keywords by those for additional members, which are the same if no
    other schema applies at this place."""
    given = dict(schema)
    is_alone = not given.keys() & _APPLICATORS
    for keyword, same in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        each = given.get(keyword, True)
        if each is True or same in given:
            given.pop(keyword, None)
        elif is_alone and not (keyword == "unevaluatedItems" and "contains" in given):
            given[same] = given.pop(keyword)
    return given
