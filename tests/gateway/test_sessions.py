"""Which calls are one session, as their jobs are marked."""

from typing import Any

import httpx
import pytest

from contract.function_types import Claimed
from contract.residence import MARK_BYTES
from tests.gateway.conftest import Gateways
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.gateway.test_priority import CALLS, PATHS, called

pytestmark = pytest.mark.anyio

NONE = bytes(MARK_BYTES)
EPHEMERAL = {"type": "ephemeral"}


async def mark_of(worker: FakeWorker, claimed: Claimed) -> bytes:
    """The mark of a job's session."""
    marks = await worker.client.hget(worker.keys.of("job", claimed.job.id), "marks")
    return marks[:MARK_BYTES] if isinstance(marks, bytes) else NONE


async def session_of(worker: FakeWorker) -> bytes:
    """That of the next job."""
    return await mark_of(worker, await worker.claim())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["prompt_cache_key", "metadata"])
async def test_calls_that_name_a_session_are_one(
    http: httpx.AsyncClient, idle_worker: FakeWorker, path: str, kind: str
) -> None:
    """Of every kind of call. Nothing is ignored."""
    found = []
    for name in ("a", "b", "a"):
        fields: Any = {kind: name} if kind == "prompt_cache_key" else {kind: {"session": name}}
        answer = await called(http, path, **fields)
        assert answer.is_success, answer.text
        assert "x-ignored-parameters" not in answer.headers
        found.append(await session_of(idle_worker))
    assert found[0] == found[2] != found[1]
    assert NONE not in found


@pytest.mark.parametrize("path", PATHS)
async def test_a_long_name_is_cut(
    http: httpx.AsyncClient, idle_worker: FakeWorker, path: str
) -> None:
    """A job keeps it. Where metadata is kept as well, its values are short."""
    for length in (511, 600, 70_000):
        answer = await called(http, path, metadata={"session": length * "s"})
        if answer.is_success:
            assert len((await idle_worker.claim()).job.session) == min(length, 512)
        else:
            assert answer.status_code == 400
            assert length > 512


async def test_the_metadata_of_a_job_names_one(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    body = {"model": MODEL, **CALLS["/v1/completions"]}
    found = []
    for inner, outer in (
        (body, {"metadata": {"session": "a"}}),
        (body | {"prompt_cache_key": "a"}, {}),
    ):
        asked = {"endpoint": "/v1/completions", "body": inner, **outer}
        assert (await http.post("/v1/jobs", json=asked)).is_success
        found.append(await session_of(idle_worker))
    assert found[0] == found[1] != NONE


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_other_calls_are_none(
    http: httpx.AsyncClient, idle_worker: FakeWorker, path: str
) -> None:
    for fields in ({}, {"metadata": {"other": "a"}}, {"metadata": None}, {"user": "a"}):
        if path == "/v1/messages":
            fields.pop("user", None)
        assert (await called(http, path, **fields)).is_success
        assert await session_of(idle_worker) == NONE


async def test_a_chain_of_responses_is_one(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """From the first on, and each branch with it; another chain is another."""
    found, ids = [], list[str]()
    for previous in (None, 0, 1, 0, None):
        fields = {} if previous is None else {"previous_response_id": ids[previous]}
        answer = await called(http, "/v1/responses", **fields)
        assert answer.is_success, answer.text
        ids.append(answer.json()["id"])
        claimed = await idle_worker.claim()
        found.append(await mark_of(idle_worker, claimed))
        await idle_worker.run(claimed)
    assert NONE not in found
    assert len(set(found[:4])) == 1
    assert found[4] != found[0]


def _marked(where: str, text: str) -> dict[str, Any]:
    """A conversation of messages, with a breakpoint somewhere."""
    part: dict[str, Any] = {"type": "text", "text": "be brief"}
    tool: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
    user: dict[str, Any] = {"type": "text", "text": text}
    body: dict[str, Any] = {
        "system": [part],
        "tools": [tool],
        "messages": [{"role": "user", "content": [user]}],
    }
    {"top": body, "system": part, "tool": tool, "message": user}[where]["cache_control"] = EPHEMERAL
    return body


@pytest.mark.parametrize("where", ["top", "system", "tool", "message"])
async def test_messages_with_a_breakpoint_are_one_conversation(
    http: httpx.AsyncClient, idle_worker: FakeWorker, where: str
) -> None:
    """By what they have up to the first of the user, whatever comes later."""
    found = []
    for text, num_turns in (("Hi", 0), ("Hi", 2), ("Ho", 0)):
        body = _marked(where, text)
        for turn in range(num_turns):
            body["messages"] += [
                {"role": "assistant", "content": f"{turn}"},
                {"role": "user", "content": [{"type": "text", "text": f"and {turn}"}]},
            ]
        answer = await called(http, "/v1/messages", **body)
        assert answer.is_success, answer.text
        found.append(await session_of(idle_worker))
    assert found[0] == found[1] != found[2]
    assert NONE not in found


@pytest.mark.parametrize("value", ["ephemeral", ["a"], 1])
async def test_a_breakpoint_is_an_object(http: httpx.AsyncClient, value: Any) -> None:
    answer = await called(http, "/v1/messages", cache_control=value)
    assert answer.status_code == 400
    assert "cache_control" in answer.text


async def test_nothing_is_marked_where_it_is_turned_off(
    gateways: Gateways, idle_worker: FakeWorker
) -> None:
    async with gateways(prefers_cached=False) as http:
        assert (await called(http, "/v1/completions", prompt_cache_key="a")).is_success
    assert await session_of(idle_worker) == NONE
