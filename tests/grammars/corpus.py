"""Schemas that people send, and those that are hard: where each comes from, its name, and the
schema."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
        for group in groups:
            draft = _DRAFTS[file.split("/")[0]]
            case = Case("suite", f"{file}: {group['description']}", group["schema"], draft)
            yield case, group["tests"]
