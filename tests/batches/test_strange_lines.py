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
from tests.batches.test_batches import CHAT, ended, jsonl, line, results, start
from tests.gateway.fake_worker import FakeWorker, says
from tests.gateway.strings_in_strings import chats
from tests.gateway.test_strings_in_strings import DEEP, with_arguments

pytestmark = pytest.mark.anyio


def request(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}


def readable(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Bodies that a line may have: another one fails the whole file."""
    while True:
        body = chats(rng)
        with contextlib.suppress(ApiError):
            parse_object(json.dumps(request(0, body)).encode())
            yield body


async def test_each_line_with_strange_strings_has_its_result(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """An answer, or an error that is not the server's."""
    worker.script = says("ab")
    deep = [with_arguments('{"a": ' + "[" * n + "]" * n + "}") for n in DEEP[::4]]
    bodies = [*deep, *itertools.islice(readable(random.Random(4)), 60)]

    batch = await ended(
        client, await start(client, jsonl([request(*each) for each in enumerate(bodies)]), CHAT)
    )

    assert batch.status == "completed", batch.errors
    found = await results(client, batch.output_file_id)
    failed = await results(client, batch.error_file_id)
    assert len(found) + len(failed) == len(bodies)
    assert {each["response"]["status_code"] for each in failed} <= {400}


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
