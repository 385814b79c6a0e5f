"""Draws requests that are near accepted ones: fields at their limits, other texts, types, bytes.
The same random numbers draw the same request.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.accepted_requests import CHANGE, CHAT, COMPLETIONS, JOBS, QUOTE, SEEDS, Seed

Header = tuple[bytes, bytes]

# How often each kind of change is drawn. More than half of all bodies must be accepted, so most
# changes lead to a request that is likely to be.
_KINDS = {"near": 80, "far": 10, "bytes": 5, "head": 5}
_PATHS = {CHAT: 36, COMPLETIONS: 36, JOBS: 20, QUOTE: 4, CHANGE: 4}

# --- values -----------------------------------------------------------------------------------

_PENALTIES = (-2, 2, -2.0, -0.0, 0, 1e-300, 2.0000000000000004)
_TOP = (0, 1, 20, 20, 21)
_LIMITS: Mapping[str, Sequence[Any]] = {  # of a call: at the limits of what is allowed, and over
    "temperature": (0, -0.0, 2, 5e-324, 1e-9, 1.9999999999999998, 2.0000000000000004),
    "top_p": (1, 1.0, 5e-324, 0.9999999999999999, 1e-9, 0),
    "top_k": (-1, 0, 1, 259, 260, 2**31 - 1, 2**31),
    "min_p": (0, 1, 5e-324, -0.0, 1.0000000000000002),
    "presence_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
    "repetition_penalty": (2, 1, 5e-324, 1e-9, 0),
    "logit_bias": (
        {},
        {"0": 100, "258": -100},
        {"007": 1},
        {"1": -0.0, "01": 2},
        {str(i): 100 for i in range(259)},
        {str(i): -100 for i in range(258)},
        {"259": 1},
        {"²": 1},
    ),
    "seed": (0, -1, 2**63 - 1, -(2**63), 2**53 + 1, 2**63),
    "n": (1, 2, 3, 4, 4, 5),
    "stop": ("x", [], ["\n"], ["a", "b", "c", "d"], ["\u0000"], ["🌍" * 10], "é", [""], "s" * 1000),
    "stop_token_ids": ([], [0], [258], list(range(64)), [65] * 64, list(range(65)), [259]),
    "max_tokens": (1, 2, 16, 60, 0, 10**6),
    "min_tokens": (0, 1, 2, 4, 5),
    "ignore_eos": (True, False),
    "stream": (True, False),
    "stream_options": ({}, {"include_usage": True}, {"include_obfuscation": True}),
    "return_token_ids": (True, False),
    "prompt_logprobs": _TOP,
    "service_tier": ("auto", "default", "priority", "flex", "scale"),
    "on_disconnect": ("cancel", "continue"),
    "user": ("", "u" * 512, "🌍" * 512, "u" * 513),
    "metadata": ({}, {"": ""}, {f"k{i}": "v" * 512 for i in range(16)}, {"k" * 500: "v"}),
}
_OF_CHAT: Mapping[str, Sequence[Any]] = {
    "logprobs": (True, False),
    "top_logprobs": _TOP,
    "max_completion_tokens": (1, 4, 5, 60),
    "messages": (
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "canary-alone"}],
        [{"role": "user", "content": [{"type": "text", "text": ""}]}],
        [{"role": "user", "content": "c"}] * 9,
        [{"role": "assistant", "content": "canary-first", "name": "n" * 64}],
        [],
    ),
}
_OF_COMPLETIONS: Mapping[str, Sequence[Any]] = {
    "logprobs": _TOP,
    "echo": (True, False),
    "best_of": (1, 2, 4),
    "prompt": ("a", [0], [258], [256, 257], ["a"], [[257]], "canary-" * 20, "<eos><bos>", "", []),
}
_OF_JOBS: Mapping[str, Sequence[Any]] = {
    "lane": ("interactive", "standard", "batch", "scoring", "nowhere"),
    "deadline_s": (1, 1.5, 604_800, 3e5, 86_400.000001, 604_801),
    "retention_s": (60, 60.0, 1e5, 2_592_000, 59),
    "metadata": ({}, {"k" * 64: "v" * 512}, {"🌍" * 64: ""}, {"k" * 65: "v"}, {"": "v"}),
    "callback": (
        None,
        {"url": "https://receiver.invalid/", "secret": "whsec_" + "A" * 32},
        {"url": "https://receiver.invalid:65535/?%41", "secret": "whsec_" + "A" * 32},
        {"url": "https://receiver.invalid/", "secret": "whsec_A"},
        {"url": "http://receiver.invalid/", "secret": "whsec_" + "A" * 32},
        {"url": "httpſ://receiver.invalid/", "secret": "whsec_" + "A" * 32},
        {"url": "https://receiverK.invalid/", "secret": "whsec_" + "A" * 32},
    ),
}
_OF_CHANGES: Mapping[str, Sequence[Any]] = {
    "lane": (*_OF_JOBS["lane"], None),
    "deadline_s": (604_800, 3_600.5, 1e5, 604_801, None),
}
_ASKS_FOR_NOTHING: Mapping[str, Sequence[Any]] = {
    "tools": (None,),
    "store": (False, True),
    "suffix": ("", "x"),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "chat_template_kwargs": ({}, {"a": 1}),
    "priority": (0, 0.0, -0.0, 1),
    "bad_words": ([], ["a"]),
}
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, -0.0, 0.5, 1.0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(10**400, 1e308, -1e308, 5e-324, 1e-400, float("nan"), float("inf"), float("-inf")),
)
_OTHERS: tuple[Any, ...] = (None, True, False, "", "1", [], {}, [[]], {"a": {}}, 1, 0.5, [None])
_TEXTS: tuple[str, ...] = (
    *("\u0000", "\u0001\u0002", "\u001b[2J", "\r\n", "\t", "\u007f", "\u0085", "\u2028", "\ufeff"),
    *("é", "e\u0301\u0323", "ß", "ſ", "K", "İ", "ı", "\u202e", "\u200b", "\u00ad", "\ufffd"),
    *(
        "\uffff",
        "\ue000",
        "漢字",
        "한국",
        "𝒳",
        "🌍",
        "👩\u200d👩\u200d👧",
        "🇺🇳",
        "\U0010ffff",
        "\u1160",
    ),
    *("<eos>", "<bos>", "<pad>", "<|im_end|>", "{{ 7 * 7 }}", "{% raw %}", "%s%n", "${x}", "../"),
    *("'", '"', "\\", "\\u0000", "</script>", "data: [DONE]\n\n", "a" * 40, " " * 40, "\n" * 40),
)
_SURROGATES = ("\ud800", "\udfff", "\udc00\ud800", "a\ud83d", "\udbff\udc01")
_NAMES = (
    "canary-field",
    "",
    "__class__",
    "model ",
    "Model",
    "n\u0000",
    "\ud800",
    "a.b",
    "0",
    "ſtop",
)

# Fields whose texts a caller is free to choose; other texts are words of ours.
_FREE = frozenset(
    {
        *("prompt", "content", "text", "stop", "user", "safety_identifier", "prompt_cache_key"),
        *("metadata", "messages"),
    }
)
_PIECES: tuple[bytes, ...] = (
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\x00", b"\xff", b"1e", b"null", b"NaN"),
    *(b" ", b"\n", b"\\u0041", b"\\ud800", b"\xc3\xa9", b"0", b"-", b"[" * 5_000),
)
_PREFERENCES: tuple[bytes, ...] = (
    *(b"respond-async", b"wait=0", b"wait=20", b"respond-async, wait=1", b"wait=\xb2", b","),
    *(b"handling=strict", b"wait=-1", b"RESPOND-ASYNC;x=y", b"wait=999999999"),
)
_HEADERS: tuple[Header, ...] = (
    *((b"prefer", value) for value in _PREFERENCES),
    *((b"idempotency-key", key) for key in (b"", b"a b", b"k" * 256, b"\xe9", b"canary-key")),
    *((b"last-event-id", value) for value in (b"0", b"1.89abcdef", b"x", b"9" * 20, b"\xb2")),
    *((b"x-request-id", value) for value in (b"", b"id", b"canary id", b"r" * 129, b"\xff")),
    *((b"accept", b"text/event-stream"), (b"accept", b"\xff"), (b"accept-encoding", b"gzip, br")),
    *((b"traceparent", b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01"), (b"traceparent", b"\xff")),
    *((b"cookie", b"canary=canary-cookie"), (b"authorization", b"Bearer canary-token")),
    *((b"content-encoding", b"gzip"), (b"expect", b"200-ok"), (b"x-canary", b"\x80" * 100)),
)
_CONTENT_TYPES: tuple[bytes, ...] = (
    *(b"application/json; charset=utf-8", b"Application/JSON", b"application/json;", b""),
    *(b"text/plain", b"application/json, text/html", b"application/\xff"),
)
_QUERIES: tuple[str, ...] = (
    *("canary-query", "starting_after=0", "starting_after=1.89abcdef", "starting_after=x"),
    *("%00=%ff", "a" * 2_000, "stream=true&stream=false", "starting_after=%C2%B2", "&&=;"),
)

# --- requests ---------------------------------------------------------------------------------


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
    """A request that is being changed. `call` is the part of `tree` that is a call's body."""

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
    """The request of a seed as it is. `number` keeps its Idempotency-Key from those of others."""
    draft = _draft(seed, number)
    return _finished(draft, json.dumps(draft.tree).encode())


def draw(rng: random.Random, number: int) -> Request:
    """A request that says something else than its seed: other spaces in the JSON do not count."""
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
            raw = _changed_bytes(rng, raw)
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


# --- changes that are likely to be accepted ---------------------------------------------------

_Change = Callable[[random.Random, _Draft], None]


def _limit(rng: random.Random, draft: _Draft) -> None:
    """A field at the limit of what it may be."""
    fields, values = draft.call, {**_LIMITS, **_ASKS_FOR_NOTHING}
    if draft.seed.path == CHANGE:
        values = dict(_OF_CHANGES)
    elif draft.seed.path in (JOBS, QUOTE) and rng.random() < 0.4:
        fields, values = draft.tree, dict(_OF_JOBS)
    else:
        values |= _OF_CHAT if draft.endpoint == CHAT else _OF_COMPLETIONS
    name = rng.choice(sorted(values))
    fields[name] = copy.deepcopy(rng.choice(values[name]))


def _text(rng: random.Random, draft: _Draft) -> None:
    """Another text where the caller is free to choose one: in a value or in a name."""
    places = [place for place in _places(draft.tree) if place.is_free]
    if not places:
        return _limit(rng, draft)
    place = rng.choice(places)
    old, new = str(place.value), rng.choice(_TEXTS)
    at = rng.randrange(len(old) + 1)
    texts = (new, old[:at] + new + old[at:], old[:at], old[at:] + old, old.upper(), new * 3)
    place.put(rng.choice(texts) or new)
    return None


def _null(rng: random.Random, draft: _Draft) -> None:
    fields = rng.choice((draft.call, draft.tree))
    if fields:
        fields[rng.choice(sorted(fields))] = None


def _drop(rng: random.Random, draft: _Draft) -> None:
    """Without one field, or one entry of something below."""
    inner = [value for value in draft.call.values() if isinstance(value, dict | list) and value]
    owner = rng.choice([draft.call, draft.call, draft.tree, *inner])
    _remove(rng, owner)


def _graft(rng: random.Random, draft: _Draft) -> None:
    """A field of another accepted request of the same kind."""
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
    """The same fields in another order."""
    fields = draft.call
    for name in rng.sample(sorted(fields), len(fields)):
        fields[name] = fields.pop(name)


_NEAR: Mapping[_Change, int] = {_limit: 20, _text: 18, _graft: 8, _null: 2, _drop: 2, _order: 2}

# --- changes that are likely to be refused ----------------------------------------------------


def _kind(rng: random.Random, draft: _Draft) -> None:
    """A value of another type."""
    rng.choice(list(_places(draft.tree))).put(copy.deepcopy(rng.choice(_OTHERS)))


def _number(rng: random.Random, draft: _Draft) -> None:
    """Another number, however large."""
    places = [p for p in _places(draft.tree) if type(p.value) in (int, float)]
    if not places:
        return _kind(rng, draft)
    place = rng.choice(places)
    old = place.value
    neighbours = (old + 1, old - 1, -old, float(old), old + 0.5, str(old))
    place.put(rng.choice((*neighbours, *_NUMBERS)))
    return None


def _name(rng: random.Random, draft: _Draft) -> None:
    """A field that nobody knows, or a known one by a wrong name."""
    owner = rng.choice([draft.tree, draft.call, *_objects(draft.tree)])
    if owner and rng.random() < 0.3:
        owner[rng.choice(_NAMES)] = owner.pop(rng.choice(sorted(owner)))
    else:
        owner[rng.choice(_NAMES)] = copy.deepcopy(rng.choice(_OTHERS))


def _length(rng: random.Random, draft: _Draft) -> None:
    """Nothing, or very much."""
    place = rng.choice(list(_places(draft.tree)))
    size = rng.choice((300, 3_000, 30_000, 300_000))
    longer: Any = "canary-" * (size // 7)
    if isinstance(place.value, list):
        longer = place.value * (size // 30 // (len(place.value) or 1) + 1)
    if isinstance(place.value, dict):
        longer = {f"canary-{i}": 1 for i in range(size // 30)}
    place.put(rng.choice((longer, longer, type(place.value)() if place.value is not None else "")))


def _nest(rng: random.Random, draft: _Draft) -> None:
    """The same, deeper."""
    place = rng.choice(list(_places(draft.tree)))
    value = place.value
    for _ in range(rng.choice((1, 2, 5, 28, 40, 200))):
        value = [value] if rng.random() < 0.5 else {"text": value}
    place.put(value)


def _surrogate(rng: random.Random, draft: _Draft) -> None:
    """Half a character, which JSON can write and UTF-8 cannot."""
    places = [place for place in _places(draft.tree) if isinstance(place.value, str)]
    if places:
        rng.choice(places).put(rng.choice(_SURROGATES))


def _word(rng: random.Random, draft: _Draft) -> None:
    """Another word where only ours may stand."""
    places = [p for p in _places(draft.tree) if isinstance(p.value, str) and not p.is_free]
    if not places:
        return _kind(rng, draft)
    place = rng.choice(places)
    old = str(place.value)
    words = (
        old.upper(),
        old + " ",
        old[:-1],
        old + "\u0000",
        "user",
        "flex",
        CHAT,
        "batch",
        "tool",
    )
    place.put(rng.choice(words))
    return None


_FAR: Mapping[_Change, int] = {
    _kind: 4,
    _number: 4,
    _name: 3,
    _length: 2,
    _nest: 2,
    _surrogate: 1,
    _word: 2,
}

# --- places in a body -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """A value, or a name of an object of free names; `put` exchanges it."""

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


def _places(node: Any, name: str = "") -> Iterator[_Place]:
    """Every value below a node, and the names of metadata."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node))
    for at, value in items:
        inner = str(at) if isinstance(node, dict) and name != "metadata" else name
        yield _Place(node, at, False, isinstance(value, str) and inner in _FREE)
        if name == "metadata":
            yield _Place(node, at, True, True)
        if isinstance(value, dict | list):
            yield from _places(value, inner)


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    return (p.value for p in _places(node) if not p.is_name and isinstance(p.value, dict))


def _remove(rng: random.Random, owner: Any) -> None:
    if owner:
        del owner[rng.choice(sorted(owner) if isinstance(owner, dict) else range(len(owner)))]


# --- bytes and heads --------------------------------------------------------------------------


def _encoded(rng: random.Random, draft: _Draft) -> bytes:
    """The JSON, in one of its spellings. A lone surrogate is no UTF-8 where it is not escaped."""
    is_ascii, indent = rng.random() < 0.5, rng.choice((None, None, None, 0, "\t"))
    text = json.dumps(draft.tree, ensure_ascii=is_ascii, indent=indent)
    return text.encode("utf-8", "surrogatepass")


def _changed_bytes(rng: random.Random, raw: bytes) -> bytes:
    """One to three changes of bytes, wherever they are."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, length = rng.randrange(len(changed) + 1), rng.randint(1, 9)
        match rng.randrange(8):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at : at + 1] = bytes([rng.randrange(0x20, 0x7F)])
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
                changed[at:at] = rng.choice(_PIECES)
            case 5:  # a name twice
                changed[1:1] = b'"model": "m", ' if rng.random() < 0.5 else b'"n": NaN, '
            case 6:
                changed[:] = changed[:at] if rng.random() < 0.3 else b" \n" + changed + b"\r\n "
            case _:
                changed[:] = changed.replace(b'"', b'"\xe2\x80\x8b', 1)
    return bytes(changed)


def _change_head(rng: random.Random, draft: _Draft) -> None:
    """Another header, or another query."""
    draft.changes.append("head")
    match rng.randrange(4):
        case 0:
            draft.query = rng.choice(_QUERIES)
        case 1:
            draft.headers[0] = (b"content-type", rng.choice(_CONTENT_TYPES))
        case 2:
            draft.headers.append(rng.choice(_HEADERS))
        case _:
            draft.headers += rng.sample(_HEADERS, 2)
