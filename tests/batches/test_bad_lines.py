"""Batches of lines drawn from all known bad inputs: each ends, and its good lines are answered."""

import asyncio
import json
import os
import random
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.batches.test_batches import CHAT, Url, line, reached, results, start
from tests.gateway.bad_requests import BODIES
from tests.gateway.fake_worker import FakeWorker

pytestmark = [pytest.mark.anyio, pytest.mark.campaign, pytest.mark.timeout(3_600)]

NUM_BATCHES = int(os.environ.get("BAD_BATCHES", "20"))
AT_ONCE = 8
NUM_LINES = 6


def _past_call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
    }


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# Fields of lines; what the server must take as well as what it must refuse.
FIELDS: list[dict[str, Any]] = [
    *(
        {"response_format": _schema(each)}
        for each in (
            {"$ref": "#"},
            {"type": "object", "properties": {f"p{n}": {} for n in range(1_000)}},
            {
                "type": "object",
                "properties": {"a": {}},
                "patternProperties": {"^a": {"type": "null"}},
            },
            {"oneOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(30)]},
            {"type": "string", "pattern": "(?=a)b"},
        )
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
ARGUMENTS = [
    '{"a":"\\ud800"}',
    '{"\\udfff":1}',
    '{"a":NaN}',
    '{"a":1e999}',
    '{"a":' + "9" * 5_000 + "}",
    *('{"a":' + "[" * depth + "]" * depth + "}" for depth in (31, 33, 940, 950, 964, 3_000)),
    "",
    "null",
    '{"a":',
]  # fmt: skip


def bad_line(chance: random.Random, number: int, url: Url) -> bytes:
    custom_id = f"bad-{number}"
    if chance.random() < 0.1:
        return chance.choice(list(BODIES.values())).replace(b"\n", b" ")[:100_000]
    fields = chance.choice(FIELDS)
    if url == CHAT and chance.random() < 0.5:
        fields = fields | _past_call(chance.choice(ARGUMENTS))
    return json.dumps(line(custom_id, url, **fields)).encode()


async def forget(client: AsyncOpenAI, file_id: str | None) -> None:
    """A tenant's files have a limit."""
    if file_id is not None:
        await client.files.delete(file_id)


async def test_every_batch_ends_and_answers_its_good_lines(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """A file with a line that is no request fails as a whole; any other batch is completed."""
    client = client.with_options(max_retries=20)  # Redis may be slow on a busy machine
    chance = random.Random(0)
    outcomes: dict[str, int] = {"completed": 0, "failed": 0}

    async def run(seed: int) -> None:
        drawn = random.Random(seed)
        url: Url = drawn.choice((CHAT, "/v1/completions"))
        good = [json.dumps(line(f"good-{n}", url)).encode() for n in range(2)]
        lines = [*good, *(bad_line(drawn, n, url) for n in range(NUM_LINES - len(good)))]
        drawn.shuffle(lines)
        batch = await start(client, b"\n".join(lines), url)
        batch = await reached(client, batch, *outcomes)
        outcomes[batch.status] += 1
        await forget(client, batch.input_file_id)
        if batch.status == "failed":
            assert batch.errors is not None
            return
        answered = await results(client, batch.output_file_id)
        refused = await results(client, batch.error_file_id)
        await forget(client, batch.output_file_id)
        await forget(client, batch.error_file_id)
        assert len(answered) + len(refused) == sum(bool(each.strip()) for each in lines)
        assert {"good-0", "good-1"} <= {each["custom_id"] for each in answered}
        for each in refused:
            assert each["response"]["status_code"] < 500, each

    async with asyncio.TaskGroup() as group:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(seed: int) -> None:
            async with turns:
                await run(seed)

        for _ in range(NUM_BATCHES):
            group.create_task(one(chance.randrange(2**32)))
    assert min(outcomes.values()) > 0
