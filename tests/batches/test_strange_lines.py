"""Lines that no other test thinks of never keep a batch from its end."""

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.http.bodies import parse_object
from gateway.http.errors import ApiError
from gateway.prepare import calls
from gateway.runners.batches import part_run
from tests.batches.test_batches import (
    CHAT,
    COMPLETIONS,
    Url,
    ended,
    ids,
    jsonl,
    line,
    results,
    start,
)
from tests.gateway.bad_requests import BODIES
from tests.gateway.fake_worker import FakeWorker, says
from tests.gateway.strings_in_strings import chats
from tests.gateway.test_strings_in_strings import DAMAGED, DEEP, with_arguments

pytestmark = pytest.mark.anyio

SCHEMAS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"type": "object", "properties": {f"p{n}": {} for n in range(1_000)}},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": {"type": "null"}}},
    {"oneOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(30)]},
    {"type": "string", "pattern": "(?=a)b"},
]
# What the server must take as well as what it must refuse.
FIELDS: list[dict[str, Any]] = [
    *(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": each}}}
        for each in SCHEMAS
    ),
    *({"guided_regex": each} for each in ("a{1000000}", "(", "(?<=a)b", "")),
    {"guided_grammar": "start: start"},
    {"guided_json": '{"type": "string", "const": "\\ud800"}'},
    {"guided_json": "[" * 5_000},
    {"guided_choice": ["a", ""]},
    {"max_tokens": -1},
    {"max_tokens": 10**9},
    {"temperature": 1e300},
    {"stop": [""]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]},
    {"logit_bias": {"999999": 1}},
    {"unknown": 1},
]


def readable(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Bodies that a line may have: another one fails the whole file."""
    while True:
        body = chats(rng)
        with contextlib.suppress(ApiError):
            parse_object(json.dumps(line("0", CHAT) | {"body": body}).encode())
            yield body


def strange_bodies() -> Iterator[dict[str, Any]]:
    """With JSON inside of strings."""
    deep = ['{"a": ' + "[" * n + "]" * n + "}" for n in DEEP[::4]]
    yield from map(with_arguments, [*deep, *DAMAGED, "", "null", '{"a":', f'{{"a":{"9" * 5_000}}}'])
    yield from itertools.islice(readable(random.Random(4)), 60)


@pytest.mark.parametrize("url", [pytest.param(CHAT, marks=pytest.mark.campaign), COMPLETIONS])
async def test_each_strange_line_has_its_result(
    client: AsyncOpenAI, worker: FakeWorker, url: Url
) -> None:
    """An answer, or an error that is not the server's; good lines are answered."""
    worker.script = says("ab")
    asked = [line("good", url), *(line(f"{n}", url, **each) for n, each in enumerate(FIELDS))]
    if url == CHAT:
        asked += [line(f"b{n}", url) | {"body": b} for n, b in enumerate(strange_bodies())]

    batch = await ended(client, await start(client, jsonl(asked), url))

    assert batch.status == "completed", batch.errors
    found = await results(client, batch.output_file_id)
    failed = await results(client, batch.error_file_id)
    assert sorted(ids(found) + ids(failed)) == sorted(ids(asked))
    assert "good" in ids(found)
    assert {each["response"]["status_code"] for each in failed} == {400}


async def test_each_line_that_is_no_request_is_an_error_of_its_file(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """None ends the reading of the others."""
    lines = [body.replace(b"\n", b" ") for body in BODIES.values()]
    batch = await ended(client, await start(client, b"\n".join(lines)))
    assert (batch.status, worker.seen) == ("failed", [])
    assert batch.errors is not None
    found = [error.line for error in batch.errors.data or []]
    assert found == [number for number, each in enumerate(lines, 1) if each.strip()]


async def test_an_unexpected_error_is_that_of_its_line(
    client: AsyncOpenAI, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch does not meet it again and again."""

    async def prepare(*args: Any) -> Any:
        if args[1].prompt == ("deep",):
            raise RecursionError
        return await calls.prepare_call(*args)

    monkeypatch.setattr(part_run, "prepare_call", prepare)

    batch = await ended(client, await start(client, jsonl([line("deep"), line("flat")])))

    assert batch.status == "completed"
    [good] = await results(client, batch.output_file_id)
    [bad] = await results(client, batch.error_file_id)
    assert (good["custom_id"], bad["custom_id"]) == ("flat", "deep")
    assert bad["response"]["status_code"] == 500
    assert bad["response"]["body"]["error"]["code"] == "internal_error"
