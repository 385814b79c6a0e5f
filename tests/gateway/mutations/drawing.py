"""Draws requests by mutating accepted ones: values at their limits, other texts, types, bytes.

The same random numbers draw the same request.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.bad_requests import spoilt
from tests.gateway.mutations import values
from tests.gateway.mutations.seeds import (
    CHANGE,
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    JOBS,
    MESSAGES,
    QUOTE,
    RERANK,
    RESPONSES,
    SCORE,
    SEEDS,
    Seed,
)
from tests.gateway.mutations.values import Header

# How often each kind of change is drawn. More than half of all bodies must be accepted, so most
# changes lead to a request that is likely to be.
_KINDS = {"near": 80, "far": 10, "bytes": 5, "head": 5}
_PATHS = {
    **{CHAT: 32, COMPLETIONS: 30, JOBS: 20, QUOTE: 4, CHANGE: 4},
    **{EMBEDDINGS: 3, RERANK: 2, SCORE: 2, CLASSIFY: 1, RESPONSES: 2, MESSAGES: 3},
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `path` may be CHANGE, which stands for a job that waits."""

    name: str  # of its seed, and what was changed
    method: str
    path: str
    query: str
    headers: tuple[Header, ...]
    body: bytes


@dataclass(slots=True)
class _Draft:
    """A request while it is mutated. `call` is the part of `tree` that is a call's body."""

    seed: Seed
    tree: Any
    headers: list[Header]
    query: str = ""
    changes: list[str] = field(default_factory=list)

    @property
    def call(self) -> dict[str, Any]:
        inner = self.tree.get("body") if self.seed.path in (JOBS, QUOTE) else self.tree
        return inner if isinstance(inner, dict) else self.tree

    @property
    def endpoint(self) -> str:
        in_job = self.seed.path in (JOBS, QUOTE)
        return str(self.seed.body["endpoint"]) if in_job else self.seed.path


def request_of(seed: Seed, number: int) -> Request:
    """An accepted request unchanged. `number` makes its Idempotency-Key unique."""
    draft = _draft(seed, number)
    return _finished(draft, json.dumps(draft.tree).encode())


def draw(rng: random.Random, number: int) -> Request:
    """A request that differs from its seed by more than white space."""
    path = _weighted(rng, _PATHS)
    seed = rng.choice([seed for seed in SEEDS if seed.path == path])
    unchanged = _draft(seed, number)
    while True:
        draft = _draft(seed, number)
        kind = _weighted(rng, _KINDS)
        for _ in range(rng.choice((1, 1, 1, 2, 3)) if kind == "near" else rng.choice((0, 0, 1))):
            _change(rng, draft, _NEAR)
        if kind == "far":
            _change(rng, draft, _FAR)
        if kind == "head":
            _change_head(rng, draft)
        raw = spelled = _encoded(rng, draft)
        if kind == "bytes":
            draft.changes.append("bytes")
            raw = spoilt(rng, raw)
        if raw != spelled or _meaning(draft) != _meaning(unchanged):
            return _finished(draft, raw)


def _meaning(draft: _Draft) -> tuple[str, str, list[Header]]:
    return json.dumps(draft.tree), draft.query, draft.headers


def _draft(seed: Seed, number: int) -> _Draft:
    headers = [(b"content-type", b"application/json")]
    for name, value in seed.headers.items():
        text = f"{value}-{number}" if name == "idempotency-key" else value
        headers.append((name.encode(), text.encode()))
    return _Draft(seed, copy.deepcopy(dict(seed.body)), headers)


def _finished(draft: _Draft, raw: bytes) -> Request:
    seed, name = draft.seed, ", ".join([draft.seed.name, *draft.changes])
    return Request(name, seed.method, seed.path, draft.query, tuple(draft.headers), raw)


def _weighted(rng: random.Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _change(rng: random.Random, draft: _Draft, changes: Mapping["_Change", int]) -> None:
    change = rng.choices(list(changes), list(changes.values()))[0]
    draft.changes.append(change.__name__.strip("_"))
    if not draft.tree:
        draft.tree["model"] = "m"  # something that can be changed
    change(rng, draft)


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
        yield Place(node, at, False, isinstance(value, str) and inner in values.FREE)
        if name == "metadata":
            yield Place(node, at, True, True)
        if isinstance(value, dict | list):
            yield from places_of(value, inner)


def objects_of(node: Any) -> Iterator[dict[str, Any]]:
    return (p.value for p in places_of(node) if not p.is_name and isinstance(p.value, dict))


# --- changes that are likely to be accepted ---------------------------------------------------

_Change = Callable[[random.Random, _Draft], None]


def _limit(rng: random.Random, draft: _Draft) -> None:
    """Sets a field to the limit of its range."""
    fields, limits = draft.call, {**values.LIMITS, **values.ASKS_FOR_NOTHING}
    if draft.seed.path == CHANGE:
        limits = dict(values.OF_CHANGES)
    elif draft.seed.path in (JOBS, QUOTE) and rng.random() < 0.4:
        fields, limits = draft.tree, dict(values.OF_JOBS)
    elif draft.endpoint in values.OF_VECTORS:
        limits = dict(values.OF_VECTORS[draft.endpoint])
    else:
        limits |= values.OF_CHAT if draft.endpoint == CHAT else values.OF_COMPLETIONS
    name = rng.choice(sorted(limits))
    fields[name] = copy.deepcopy(rng.choice(limits[name]))


def _text(rng: random.Random, draft: _Draft) -> None:
    """Replaces a text that callers may choose freely: a value or a name."""
    places = [place for place in places_of(draft.tree) if place.is_free]
    if not places:
        _limit(rng, draft)
        return
    place = rng.choice(places)
    old, new = str(place.value), rng.choice(values.TEXTS)
    at = rng.randrange(len(old) + 1)
    texts = (new, old[:at] + new + old[at:], old[:at], old[at:] + old, old.upper(), new * 3)
    place.put(rng.choice(texts) or new)


def _null(rng: random.Random, draft: _Draft) -> None:
    fields = rng.choice((draft.call, draft.tree))
    if fields:
        fields[rng.choice(sorted(fields))] = None


def _drop(rng: random.Random, draft: _Draft) -> None:
    """Removes a field or an entry."""
    inner = [value for value in draft.call.values() if isinstance(value, dict | list) and value]
    owner = rng.choice([draft.call, draft.call, draft.tree, *inner])
    _remove(rng, owner)


def _graft(rng: random.Random, draft: _Draft) -> None:
    """Copies a field from another accepted request of the same kind."""
    others = [seed for seed in SEEDS if seed.path == draft.seed.path]
    source = dict(rng.choice(others).body)
    target: dict[str, Any] = draft.tree
    if draft.endpoint in (CHAT, COMPLETIONS) and rng.random() < 0.8:
        source = dict(rng.choice([seed for seed in SEEDS if seed.path == draft.endpoint]).body)
        target = draft.call
    source.pop("endpoint", None)
    if name := rng.choice([*sorted(source), None]):
        target[name] = copy.deepcopy(source[name])


def _order(rng: random.Random, draft: _Draft) -> None:
    """Reorders the fields."""
    fields = draft.call
    for name in rng.sample(sorted(fields), len(fields)):
        fields[name] = fields.pop(name)


_NEAR: Mapping[_Change, int] = {_limit: 20, _text: 18, _graft: 8, _null: 2, _drop: 2, _order: 2}

# --- changes that are likely to be refused ----------------------------------------------------


def _kind(rng: random.Random, draft: _Draft) -> None:
    """Replaces a value by one of another type, or by a lone surrogate."""
    others = (*values.OTHERS, *values.SURROGATES)
    rng.choice(list(places_of(draft.tree))).put(copy.deepcopy(rng.choice(others)))


def _number(rng: random.Random, draft: _Draft) -> None:
    """Replaces a number, by one of any size."""
    places = [p for p in places_of(draft.tree) if type(p.value) in (int, float)]
    if not places:
        _kind(rng, draft)
        return
    place = rng.choice(places)
    old = place.value
    neighbours = (old + 1, old - 1, -old, float(old), old + 0.5, str(old))
    place.put(rng.choice((*neighbours, *values.NUMBERS)))


def _name(rng: random.Random, draft: _Draft) -> None:
    """Adds an unknown field, or misspells a known one."""
    owner = rng.choice([draft.tree, draft.call, *objects_of(draft.tree)])
    if owner and rng.random() < 0.3:
        owner[rng.choice(values.NAMES)] = owner.pop(rng.choice(sorted(owner)))
    else:
        owner[rng.choice(values.NAMES)] = copy.deepcopy(rng.choice(values.OTHERS))


def _length(rng: random.Random, draft: _Draft) -> None:
    """Makes a value empty or very long."""
    place = rng.choice(list(places_of(draft.tree)))
    size = rng.choice((300, 3_000, 30_000, 300_000))
    longer: Any = "canary-" * (size // 7)
    if isinstance(place.value, list):
        longer = place.value * (size // 30 // (len(place.value) or 1) + 1)
    if isinstance(place.value, dict):
        longer = {f"canary-{i}": 1 for i in range(size // 30)}
    place.put(rng.choice((longer, longer, type(place.value)() if place.value is not None else "")))


def _nest(rng: random.Random, draft: _Draft) -> None:
    """Nests a value deeper."""
    place = rng.choice(list(places_of(draft.tree)))
    value = place.value
    for _ in range(rng.choice((1, 2, 5, 28, 40, 200))):
        value = [value] if rng.random() < 0.5 else {"text": value}
    place.put(value)


def _word(rng: random.Random, draft: _Draft) -> None:
    """Replaces a word of a fixed set."""
    places = [p for p in places_of(draft.tree) if isinstance(p.value, str) and not p.is_free]
    if not places:
        _kind(rng, draft)
        return
    place = rng.choice(places)
    old = str(place.value)
    words = (old.upper(), old + " ", old[:-1], old + "\u0000", "user", CHAT, "batch", "tool")
    place.put(rng.choice(words))


_FAR: Mapping[_Change, int] = {_kind: 4, _number: 4, _name: 3, _length: 2, _nest: 2, _word: 2}


def _remove(rng: random.Random, owner: Any) -> None:
    if owner:
        del owner[rng.choice(sorted(owner) if isinstance(owner, dict) else range(len(owner)))]


# --- bytes and heads --------------------------------------------------------------------------


def _encoded(rng: random.Random, draft: _Draft) -> bytes:
    """Encodes the JSON with random spacing and escapes. A lone surrogate must be escaped to be
    UTF-8."""
    is_ascii, indent = rng.random() < 0.5, rng.choice((None, None, None, 0, "\t"))
    text = json.dumps(draft.tree, ensure_ascii=is_ascii, indent=indent)
    return text.encode("utf-8", "surrogatepass")


def _change_head(rng: random.Random, draft: _Draft) -> None:
    """Changes a header or the query."""
    draft.changes.append("head")
    match rng.randrange(4):
        case 0:
            draft.query = rng.choice(values.QUERIES)
        case 1:
            draft.headers[0] = (b"content-type", rng.choice(values.CONTENT_TYPES))
        case 2:
            draft.headers.append(rng.choice(values.HEADERS))
        case _:
            draft.headers += rng.sample(values.HEADERS, 2)
