"""Each body ends at its first wrong place: bodies of 4 MiB are derived from the schema of each
model, at each of its fields.

The models are the app's own: those of its routes and of batches' lines with those in their fields,
so that a new model is tried without a line here.
"""

import itertools
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from contract.jobs import Endpoint
from gateway.app import create_app
from gateway.http.errors import no_such_model
from gateway.http.handlers import translated
from gateway.prepare.job_bodies import AnyJob
from gateway.prepare.unsupported import CallFields, StrictModel, ignored_header
from gateway.runners.batches import lines
from tests.gateway.conftest import make_settings, openapi_document

MAX_S, MAX_BYTES = 0.25, 24 * 2**20  # of one validation: processor time, memory beside the body
MAX_ERRORS = 64  # a body has those of each field, a union those of each branch
MAX_ANSWER = 4_096  # bytes of a refusal, or of the names that are ignored
SIZE = 4 * 2**20  # of a body

Schema = Mapping[str, Any]


# The models.


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation, and in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
            for each in field.metadata:  # validators name models that only the document has
                yield from models_in(getattr(each, "json_schema_input_type", None))
    for each in get_args(annotation):
        yield from models_in(each)


def leaves(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The gateway's models that no other inherits."""
    for each in model.__subclasses__():
        yield from leaves(each)
    if not model.__subclasses__() and model.__module__.startswith("gateway."):
        yield model


def models_of_the_app() -> list[type[BaseModel]]:
    app = create_app(make_settings("redis://localhost"))
    fields = [
        route.body_field.field_info.annotation
        for route in app.routes
        if isinstance(route, APIRoute) and route.body_field is not None
    ]
    of_lines = list(lines._BODIES.values())
    found = [*itertools.chain(*map(models_in, [*fields, *of_lines, *leaves(StrictModel)]))]
    return sorted(set(found), key=lambda each: (each.__name__, each.__module__))


MODELS = models_of_the_app()


# Values that fit a schema.


def resolved(schema: Schema, defs: Schema) -> Schema:
    while "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    return schema


def branches(schema: Schema, defs: Schema) -> list[Schema]:
    schema = resolved(schema, defs)
    both = schema.get("anyOf") or schema.get("oneOf")
    return [schema] if both is None else [b for each in both for b in branches(each, defs)]


def samples(schema: Schema, defs: Schema) -> list[Any]:
    """Small values, some of which a model takes: each option, each optional field alone."""
    found: list[Any] = []
    for branch in branches(schema, defs):
        if "const" in branch or "enum" in branch:
            found += branch.get("enum") or [branch["const"]]
            continue
        match branch.get("type"):
            case "string":
                is_hash = branch.get("pattern", "").endswith("{32}$")
                found.append("a" * (32 if is_hash else branch.get("minLength", 1)))
            case "integer" | "number":
                found.append(max(1, branch.get("minimum", 1)))
            case "boolean":
                found.append(True)
            case "array":
                length = max(1, branch.get("minItems", 1))
                found += [[item] * length for item in samples(branch.get("items", {}), defs)]
            case "object" if "properties" in branch:
                found += objects(branch, defs)
            case "object":
                found += [{"1": value} for value in samples(members(branch), defs)]
            case "null":
                pass
            case _:
                found.append(1)
    return found


def members(schema: Schema) -> Schema:
    """The schema of an object's values; {} if there is none."""
    values = schema.get("additionalProperties")
    return values if isinstance(values, dict) else {}


def objects(schema: Schema, defs: Schema) -> list[dict[str, Any]]:
    fields = {name: samples(each, defs) for name, each in schema["properties"].items()}
    required = schema.get("required", ())
    least = {name: fields[name][0] for name in required}
    bases = [least] + [least | {name: value} for name in required for value in fields[name][1:]]
    return bases + [
        base | {name: value}
        for base in bases[:8]
        for name in fields.keys() - required
        for value in fields[name][:3]
    ]


# Bodies of 4 MiB.


class Values:
    """Values of `size` bytes as JSON, made once."""

    def __init__(self, size: int) -> None:
        self.size = size
        deep: Any = 1
        for _ in range(15):
            deep = [{"type": [1] * (size // 30), "a": deep}]
        self.names: dict[str, dict[str, Any]] = {
            "many names": {str(number): 1 for number in range(size // 10)},
            "a long name": {"a" * size: 1},
            "long names": {f"{number}" + "a" * 4_000: 1 for number in range(size // 4_000)},
        }
        self.all: dict[str, Any] = self.names | {
            "numbers": [1] * (size // 2),
            "texts": ["a"] * (size // 4),
            "empty texts": [""] * (size // 3),
            "lists": [[]] * (size // 3),
            "lists of numbers": [[1] * 1_000] * (size // 2_000),
            "objects": [{}] * (size // 3),
            "objects with names": [dict.fromkeys("abcdefgh", 1)] * (size // 50),
            "nulls": [None] * (size // 5),
            "a text": "a" * size,
            "a text beyond ASCII": "é" * (size // 2),
            "names of lists": dict.fromkeys(self.names_of(size // 12), [1]),
            "names of texts": dict.fromkeys(self.names_of(size // 12), "a"),
            "deep": deep,
            "a long number": 10**4_000,
            **{repr(value): value for value in (-1, 1, 1.5, True, None, {}, [], "")},
        }

    @staticmethod
    def names_of(number: int) -> list[str]:
        return [str(each) for each in range(number)]


def hostile(model: type[BaseModel], values: Values) -> Iterator[tuple[str, Any]]:
    """Bodies, each with its name: with a hostile value at each place, alone and beside others."""
    schema = model.model_json_schema()
    defs = schema.get("$defs", {})
    right = [each for each in objects(schema, defs) if is_taken(model, each)]
    assert right or not schema["properties"], "no sample fits: complete `samples`"
    yield from values.all.items()
    for kind, value in values.all.items():
        yield f"{kind} in each field", dict.fromkeys(schema["properties"], value)
    for kind, names in values.names.items():
        for each in right[:3]:
            yield f"{kind} beside others", each | names
    for name, field in schema["properties"].items():
        base = next((each for each in right if name in each), right[0])
        for path, body in at(name, field, defs, values):
            yield path, base | {name: body}


def at(path: str, field: Schema, defs: Schema, values: Values) -> Iterator[tuple[str, Any]]:
    """Values of a field: hostile ones, and such as fit, as many as 4 MiB and the schema allow."""
    for kind, value in values.all.items():
        yield f"{path}: {kind}", value
    for branch in branches(field, defs):
        for kind, names in values.names.items():
            if "properties" in branch:
                yield f"{path}: {kind} beside others", objects(branch, defs)[0] | names
            elif branch.get("type") == "object":
                for each in samples(members(branch), defs):
                    yield f"{path}: {kind} of {each!r}", dict.fromkeys(names, each)
        if branch.get("type") != "array":
            continue
        items = branch.get("items", {})
        for inner, value in at(f"{path}.0", items, defs, values):
            yield inner, [value]
        for each, length in itertools.product(samples(items, defs), (1, 2, 100)):
            item = grown(each, length)
            if item == each and length > 1:
                continue
            number = values.size // (len(json.dumps(item)) + 1)
            most = min(number, branch.get("maxItems", number))
            for count in {number, most, most // length}:
                yield f"{path}: {count} times {each!r} x {length}", [item] * count
            yield f"{path}: a last wrong one after {each!r}", [item] * (most - 1) + [values.names]


def grown(value: Any, length: int) -> Any:
    """The value with longer lists."""
    if isinstance(value, list):
        return [grown(each, length) for each in value] * length
    if isinstance(value, dict):
        return {name: grown(each, length) for name, each in value.items()}
    return value


# What becomes of them.


def is_taken(model: type[BaseModel], body: Any) -> bool:
    try:
        model.model_validate(body)
    except ValidationError:
        return False
    return True


def answer(model: type[BaseModel], body: Any) -> tuple[int, bytes]:
    """The number of errors, and the first as the gateway answers it; or the header of ignored
    names."""
    try:
        taken = model.model_validate(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        error = translated({**first, "loc": ("body", *first["loc"])}, body)
        return exc.error_count(), bytes(error.response().body)
    header = ignored_header(taken) if isinstance(taken, CallFields) else {}
    return 0, str(header).encode()


def check(model: type[BaseModel], values: Values) -> str:
    """Tries all hostile bodies of a model. Returns the worst, in words."""
    worst = (0.0, 0, "")
    for name, body in hostile(model, values):
        begin = time.process_time()
        num_errors, text = answer(model, body)
        taken_s = time.process_time() - begin
        assert num_errors <= MAX_ERRORS, f"{name[:200]}: {num_errors} errors"
        assert len(text) <= MAX_ANSWER, f"{name[:200]}: an answer of {len(text)} bytes"
        peak = peak_of(lambda b=body: answer(model, b)) if taken_s > 0.002 else 0
        assert taken_s <= MAX_S, f"{name[:200]}: {taken_s:.3f} s"
        assert peak <= MAX_BYTES, f"{name[:200]}: {peak / 2**20:.1f} MiB"
        worst = max(worst, (taken_s, peak, name[:200]))
    return f"{model.__name__}: {worst[0]:.3f} s, {worst[1] / 2**20:.1f} MiB: {worst[2]}"


def peak_of(call: Callable[[], object]) -> int:
    """The memory that a call takes at its highest, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def values() -> Values:
    return Values(SIZE)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_first_wrong_place_ends_a_body(model: type[BaseModel], values: Values) -> None:
    """Each is refused with a short answer, or taken, in a bounded time and memory."""
    print(check(model, values))
