"""Each body ends at its first wrong place: bodies of 4 MiB are derived from the schema of each
model, at each of its fields.

The models are the app's own: those of its routes and of batches' lines with those in their fields,
so that a new model is tried without a line here.
"""

import functools
import gc
import itertools
import json
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_args

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from gateway.app import create_app
from gateway.http.errors import ApiError, no_such_model
from gateway.http.handlers import translated
from gateway.prepare.job_bodies import AnyJob
from gateway.prepare.unsupported import CallFields, StrictModel, ignored_header
from gateway.runners.batches import lines
from tests.gateway.conftest import make_settings, openapi_document
from tests.marks import LONG

MAX_S, MAX_BYTES = 0.25, 24 * 2**20  # of one validation: processor time, memory beside the body
MAX_ERRORS = 64  # a body has those of each field, a union those of each branch
MAX_ANSWER = 4_096  # bytes of a refusal, or of the names that are ignored
NUM_SAMPLES = 6  # of a list's items, of different shapes: those that cost most for each byte
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


def models_of(app: FastAPI) -> list[type[BaseModel]]:
    fields = [
        route.body_field.field_info.annotation
        for route in app.routes
        if isinstance(route, APIRoute) and route.body_field is not None
    ]
    of_lines = list(lines._BODIES.values())
    found = [*itertools.chain(*map(models_in, [*fields, *of_lines, *leaves(StrictModel)]))]
    return sorted(set(found), key=lambda each: (each.__name__, each.__module__))


APP = create_app(make_settings("redis://localhost", console=True))
MODELS = models_of(APP)
# Each takes seconds; the later ones have the fields of those before.
LARGE: dict[str, Any] = dict.fromkeys(
    ("ChatBody", "Message", "MessageParam", "MessagesBody", "ResponseBody"), pytest.mark.campaign
)
LARGE |= dict.fromkeys(("TokenizedChat", "TokenizedPrompt", "PromptBody", "InputTokensBody"), LONG)


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
                pattern = branch.get("pattern", "")
                is_hash = pattern.endswith("{32}$")
                start = "file-" if pattern.startswith("^file-") else ""
                if pattern.endswith("[smhd]$"):
                    found.append("24h")
                    continue
                found.append(start + "a" * (32 if is_hash else branch.get("minLength", 1)))
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
            "many names": {str(number): 1 for number in range(size // 40)},
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
            "names of lists": {str(each): [1] for each in range(size // 12)},
            "names of texts": {str(each): "a" for each in range(size // 12)},
            "deep": deep,
            "a long number": 10**4_000,
            **{text: json.loads(text) for text in ("-1", "1", "1.5", "true", "null", "{}", "[]")},
        }


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
        takes = functools.partial(is_taken_at, model, base, name)
        for path, value in at(name, field, takes, defs, values):
            yield path, base | {name: value}


def at(
    path: str, field: Schema, takes: Callable[[Any], bool], defs: Schema, values: Values
) -> Iterator[tuple[str, Any]]:
    """Values of a field, or of what lists in it hold: hostile ones, and such as fit, as many as
    4 MiB and the schema allow. `takes` tells whether a value fits."""
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
        for name, value in at(f"{path}.0", items, lambda v: takes([v]), defs, values):
            yield name, [value]
        densest = sorted(samples(items, defs), key=lambda v: (takes([v]), density(v)))
        chosen = [*{names_in(each): each for each in densest}.values()][-NUM_SAMPLES:]
        for each, length in itertools.product(chosen, (1, 2)):
            item = grown(each, length)
            if item == each and length > 1:
                continue
            number = values.size // (len(json.dumps(item)) + 1)
            most = min(number, branch.get("maxItems", number))
            for count in {number, most}:
                yield f"{path}: {count} times {each!r} x {length}", [item] * count
            if length == 1:
                yield f"{path}: one wrong after {each!r}", [item] * (most - 1) + [values.names]


def grown(value: Any, length: int) -> Any:
    """The value with longer lists."""
    if isinstance(value, list):
        return [grown(each, length) for each in value] * length
    if isinstance(value, dict):
        return {name: grown(each, length) for name, each in value.items()}
    return value


def names_in(value: Any) -> str:
    """The shape of a value: its names and brackets."""
    return re.sub(r"[^][{}:]+(?=[],}])", "", json.dumps(value))


def density(value: Any) -> float:
    """Objects, lists and texts per byte."""
    text = json.dumps(value)
    return sum(map(text.count, '{["')) / len(text)


# What becomes of them.


def is_taken(model: type[BaseModel], body: Any) -> bool:
    try:
        model.model_validate(body)
    except ValidationError:
        return False
    return True


def is_taken_at(model: type[BaseModel], base: dict[str, Any], name: str, value: Any) -> bool:
    return is_taken(model, base | {name: value})


def refusal(exc: ValidationError, body: Any) -> ApiError:
    """The first error as the gateway answers it."""
    first = exc.errors(include_url=False)[0]
    return translated({**first, "loc": ("body", *first["loc"])}, body)


def answer(model: type[BaseModel], body: Any) -> tuple[int, bytes]:
    """The number of errors, and the first as the gateway answers it; or the header of ignored
    names."""
    try:
        taken = model.model_validate(body)
    except ValidationError as exc:
        return exc.error_count(), bytes(refusal(exc, body).response({"path": "/"}).body)
    header = ignored_header(taken) if isinstance(taken, CallFields) else {}
    return 0, str(header).encode()


def check(model: type[BaseModel], values: Values) -> None:
    """Tries all hostile bodies of a model."""
    for name, body in hostile(model, values):
        begin = time.thread_time()
        num_errors, text = answer(model, body)
        taken_s = time.thread_time() - begin
        assert num_errors <= MAX_ERRORS, f"{name[:200]}: {num_errors} errors"
        assert len(text) <= MAX_ANSWER, f"{name[:200]}: an answer of {len(text)} bytes"
        peak = peak_of(functools.partial(answer, model, body)) if taken_s > 0.01 else 0
        assert taken_s <= MAX_S, f"{name[:200]}: {taken_s:.3f} s"
        assert peak <= MAX_BYTES, f"{name[:200]}: {peak / 2**20:.1f} MiB"


def peak_of(call: Callable[[], object]) -> int:
    """The memory that a call takes at its highest, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def values() -> Iterator[Values]:
    """The time of a validation is its own: the collector of garbage leaves these values out."""
    made = Values(SIZE)
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=LARGE.get(model.__name__, ())) for model in MODELS],
    ids=lambda model: model.__name__,
)
def test_the_first_wrong_place_ends_a_body(model: type[BaseModel], values: Values) -> None:
    """Each is refused with a short answer, or taken, in a bounded time and memory."""
    check(model, values)


def test_every_body_of_the_document_is_tried() -> None:
    """The models are found in another way than by the document."""
    document = openapi_document()
    bodies = [
        content["schema"]
        for path in document["paths"].values()
        for operation in path.values()
        for kind, content in operation.get("requestBody", {}).get("content", {}).items()
        if kind == "application/json"
    ]
    names = {
        ref.rpartition("/")[2] for ref in re.findall(r'"\$ref": "([^"]+)"', json.dumps(bodies))
    }
    assert len(names) > 20
    assert names <= {model.__name__ for model in MODELS}


class Part(BaseModel):
    text: str


BOUNDED = Field(max_length=16)
PLANTED: dict[str, Any] = {
    "list": list[int],
    "list or null": list[str] | None,
    "list of lists": Annotated[list[list[int]], BOUNDED],
    "list of models": list[Part],
    "object": dict[str, float],
    "object of lists": Annotated[dict[str, list[int]], BOUNDED],
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_model_without_bounds_is_found_and_cannot_be_declared_strict(kind: str) -> None:
    """It would collect an error for each number of a body. It is found by its route."""
    planted = create_model("Planted", given=(PLANTED[kind], ...))
    app = FastAPI()

    @app.post("/")
    async def take(asked: planted) -> None:  # type: ignore[valid-type]
        """The route."""

    assert planted in models_of(app)
    with pytest.raises(AssertionError, match="errors"):
        check(planted, Values(SIZE // 64))
    with pytest.raises(TypeError, match="without max_length"):
        create_model("Strict", __base__=StrictModel, given=(PLANTED[kind], ...))


@pytest.mark.parametrize(
    "name", ["given", "metadata", "default", "type", "fail_fast", "max_length"]
)
@pytest.mark.parametrize(
    ("annotation", "wrong"),
    [
        (Annotated[list[int], BOUNDED], ["a", "b"]),
        (Annotated[dict[str, int], BOUNDED], {"a": "b", "c": "d"}),
        (Annotated[dict[str, Annotated[list[int], BOUNDED]], BOUNDED], {"a": [""], "b": [""]}),
        (Annotated[list[int], BOUNDED] | None, ["a", "b"]),
    ],
)
def test_a_strict_model_reports_one_error(name: str, annotation: Any, wrong: Any) -> None:
    """Also in fields that are named as parts of pydantic's own schemas."""
    fields: dict[str, Any] = {name: (annotation, ...)}
    strict = create_model("Strict", __base__=StrictModel, **fields)
    with pytest.raises(ValidationError) as caught:
        strict.model_validate({name: wrong})
    assert caught.value.error_count() == 1
    check(strict, Values(SIZE // 64))


def test_the_endpoint_of_a_job_is_not_in_the_answer(values: Values) -> None:
    """pydantic's own message quotes it."""
    jobs: TypeAdapter[AnyJob] = TypeAdapter(Annotated[AnyJob, Field(discriminator="endpoint")])
    for given in values.all.values():
        body = {"endpoint": given, "body": {}}
        with pytest.raises(ValidationError) as caught:
            jobs.validate_python(body)
        error = refusal(caught.value, body)
        assert error.param == "endpoint"
        assert len(error.response({"path": "/"}).body) < MAX_ANSWER
        assert "aaa" not in error.message


def test_a_name_is_compared_with_few_others_by_its_first_characters() -> None:
    """The time of a comparison grows with the square of its length, and with their number."""
    known = ["a" * (1 + number % 256) for number in range(5_000)]
    begin = time.thread_time()
    assert "did you mean 'aaaa" in no_such_model("a" * SIZE, known).message
    assert time.thread_time() - begin <= MAX_S
