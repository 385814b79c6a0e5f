"""Schemas that people send, and those that are hard: where each comes from, its name, and the
schema."""

import dataclasses
import enum
import gzip
import json
import uuid
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Required

from openai.lib._pydantic import to_strict_json_schema
from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Str,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    NegativeFloat,
    NegativeInt,
    NonNegativeFloat,
    PastDate,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StrictBool,
    TypeAdapter,
    create_model,
)
from typing_extensions import TypedDict

DATA = Path(__file__).parent / "data"


class Case(NamedTuple):
    source: str
    name: str
    schema: Any
    draft: str = ""  # the address of its metaschema, where the schema does not name it


def read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def published() -> Iterator[Case]:
    """Of JSONSchemaBench, zod and GitHub's OpenAPI document."""
    for file in ("jsonschemabench", "zod", "github"):
        for name, schema in read(f"{file}.json.gz").items():
            yield Case(file, name, schema)


_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def suite() -> Iterator[tuple[Case, list[dict[str, Any]]]]:
    """Of JSON-Schema-Test-Suite, with its instances."""
    for file, groups in read("json-schema-test-suite.json.gz").items():
        if file.endswith("optional/ecmascript-regex"):
            continue  # the classes of ECMA's expressions are ASCII's; jsonschema's are Python's
        for group in groups:
            draft = _DRAFTS[file.split("/")[0]]
            case = Case("suite", f"{file}: {group['description']}", group["schema"], draft)
            yield case, group["tests"]


class _Color(enum.Enum):
    RED = "red"
    BLUE = 2


class _Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class _Dog(BaseModel):
    kind: Literal["dog"]
    friends: "list[_Cat | _Dog]" = []


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: float
    children: "list[_Node]"
    parent: "_Node | None" = None


class _Point(NamedTuple):
    x: int
    y: Annotated[float, Field(gt=0, lt=1)]


class _Movie(TypedDict, total=False):
    title: Required[str]
    year: int


@dataclasses.dataclass
class _Order:
    number: Annotated[int, Field(multiple_of=5)]
    lines: Annotated[list[tuple[str, int]], Field(min_length=1, max_length=3)]
    paid: bool = False


_TYPES: tuple[Any, ...] = (
    *(str, int, float, bool, bytes, None, Any, Decimal, uuid.UUID, Path, SecretStr, ByteSize),
    *(date, datetime, time, timedelta, IPv4Address, IPv6Address, AnyUrl, HttpUrl, Base64Str),
    *(set[int], frozenset[Literal["a", "b"]], list[str], tuple[int, str], tuple[int, ...]),
    *(dict[str, int], dict[_Color, bool], dict[int, str], int | str | None, _Color),
    *(PositiveInt, NegativeInt, NonNegativeFloat, PositiveFloat, NegativeFloat, StrictBool),
    *(_Cat, _Dog, _Node, _Point, _Movie, _Order, Json, AwareDatetime, PastDate),
    Annotated[_Cat | _Dog, Field(discriminator="kind")],
    Annotated[float, Field(gt=0, le=0.5)],
    Annotated[float, Field(ge=-0.5, lt=0)],
    Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    Annotated[Decimal, Field(gt=0, multiple_of=0.5)],
    Annotated[int, Field(ge=-(2**63), lt=2**63)],
    Annotated[str, Field(pattern=r"^[A-Z]{2}-\d+$", max_length=9)],
    Annotated[str, Field(min_length=1, max_length=10_000)],
    Annotated[list[int], Field(min_length=2, max_length=4)],
    Annotated[dict[Annotated[str, Field(pattern="^x_")], int], Field(min_length=1)],
)


def pydantic_types() -> Iterator[Case]:
    """Whatever pydantic describes, as a client's models do: alone and as fields of one model."""
    for each in _TYPES:
        yield Case("pydantic", str(each), TypeAdapter(each).json_schema())
    fields: dict[str, Any] = {f"field_{i}": (each, ...) for i, each in enumerate(_TYPES)}
    yield Case("pydantic", "a model", create_model("Model", **fields).model_json_schema())
    schema = to_strict_json_schema(create_model("Strict", **fields))
    yield Case("pydantic", "as the openai client sends it", schema)
