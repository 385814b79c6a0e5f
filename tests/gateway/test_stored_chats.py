"""Chats with `store: true`: read, listed, deleted, of one tenant, with the official client."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from contract.function_types import Release
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import Bearer, Gateways, answered, error_of, gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_responses_api import PARAMETERS, client, thinks_and_calls
from tests.gateway.test_stored_responses import has_object
from tests.streams import events_of

__all__ = ["client"]
pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HI, "store": True}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
# What a request asks for -> what is shown of it.
ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "several choices": {"n": 3, "seed": 7, "temperature": 0.5},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": TOOLS, "tool_choice": "auto", "user": "me"},
    "the prompt": {"return_token_ids": True, "prompt_logprobs": 1},
}


async def ids_of(http: httpx.AsyncClient, **query: Any) -> list[str]:
    answer = await http.get(PATH, params=query)
    assert answer.status_code == 200, answer.text
    return [chat["id"] for chat in answer.json()["data"]]


async def stored(http: httpx.AsyncClient, **fields: Any) -> str:
    return str((await answered(http, PATH, BODY, **fields))["id"])


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_stored_chat_is_read_as_it_was_answered(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any]
) -> None:
    """Whole, in the list too, and with what was asked."""
    if "tools" in asked:
        worker.script = thinks_and_calls
    answer = await http.post(PATH, json={**BODY, **asked, "metadata": {"a": "b"}})
    assert "metadata" not in answer.headers.get("x-ignored-parameters", "")
    created = answer.json()

    found = (await http.get(f"{PATH}/{created['id']}")).json()

    assert {name: found[name] for name in created} == created
    assert found["metadata"] == {"a": "b"}
    names = ("seed", "temperature", "tools", "tool_choice", "response_format")
    assert {name: found[name] for name in names if name in asked} == {
        name: asked[name] for name in names if name in asked
    }
    assert found["input_user"] == asked.get("user")
    assert (await http.get(PATH)).json()["data"] == [found]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_stream_is_stored(
    client: AsyncOpenAI, http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any]
) -> None:
    """With the choices that the same call has as a whole answer."""
    if "tools" in asked:
        worker.script = thinks_and_calls
    id_ = ""
    async with http.stream("POST", PATH, json={**BODY, **asked, "stream": True}) as answer:
        async for event in events_of(answer):
            id_ = event.data["id"] if isinstance(event.data, dict) else id_
    found = await client.chat.completions.retrieve(id_)
    whole = await answered(http, PATH, BODY, **asked)
    assert found.usage is not None
    assert found.usage.completion_tokens == whole["usage"]["completion_tokens"]
    shown = (await http.get(f"{PATH}/{id_}")).json()["choices"]
    for choice in (*shown, *whole["choices"]):
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]  # of another job
    assert shown == whole["choices"]


async def test_the_official_client_reads_lists_and_deletes(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """By all of its calls; a deleted one is gone with its job."""
    create = client.chat.completions.create
    chats = [
        await create(model=MODEL, messages=HI, store=True, metadata={"n": str(number % 2)})
        for number in range(5)
    ]
    await create(model=MODEL, messages=HI)
    ids = [chat.id for chat in chats]

    listed = [chat.id async for chat in client.chat.completions.list(limit=2)]
    assert listed == ids
    listed = [chat.id async for chat in client.chat.completions.list(limit=2, order="desc")]
    assert listed == ids[::-1]
    listed = [chat.id async for chat in client.chat.completions.list(metadata={"n": "1"})]
    assert listed == ids[1::2]
    assert [chat.id async for chat in client.chat.completions.list(model=MODEL)] == ids
    assert [chat.id async for chat in client.chat.completions.list(model="x")] == []
    messages = [
        message async for message in client.chat.completions.messages.list(ids[0], order="asc")
    ]
    assert [(message.role, message.content) for message in messages] == [("user", "Hi")]
    assert (await client.chat.completions.retrieve(ids[0])).choices == chats[0].choices

    deleted = await client.chat.completions.delete(ids[0])

    assert (deleted.id, deleted.deleted) == (ids[0], True)
    assert deleted.object == "chat.completion.deleted"
    for read in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            await read(ids[0])
    assert [chat.id async for chat in client.chat.completions.list()] == ids[1:]
    left = [key async for key in worker.client.scan_iter(f"*{ids[0].removeprefix('chatcmpl-')}*")]
    assert left == []


async def test_messages_are_listed_as_they_were_given(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """Of every role, in pages of either order."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind.", "name": "me"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    id_ = await stored(http, messages=messages, tools=TOOLS)
    path = f"{PATH}/{id_}/messages"
    page = (await http.get(path)).json()
    assert [message["id"] for message in page["data"]] == [f"{id_}-{i}" for i in range(4)]
    shown = [{**m, "content": "a\nb"} if m["role"] == "user" else m for m in messages]
    for message, given in zip(page["data"], shown, strict=True):
        assert message == {"id": message["id"], "content_parts": None} | given
    last = (await http.get(path, params={"order": "desc", "limit": 1})).json()
    assert (last["data"], last["has_more"]) == (page["data"][3:], True)
    rest = (await http.get(path, params={"after": f"{id_}-1"})).json()
    assert (rest["data"], rest["has_more"]) == (page["data"][2:], False)
    assert error_of(await http.get(path, params={"after": "x"})) == (400, "after", "invalid_value")


@pytest.mark.parametrize("asked", [{}, {"store": False}, {"store": None}])
async def test_a_chat_that_is_not_stored_is_not_found(
    http: httpx.AsyncClient, worker: FakeWorker, asked: dict[str, Any]
) -> None:
    """Nor is a response, or another job, under its id; and no stored chat is a response."""
    body = {name: value for name, value in BODY.items() if name != "store"}
    ids = [(await answered(http, PATH, body | asked))["id"]]
    response = await answered(http, "/v1/responses", {"model": MODEL, "input": "Hi"})
    ids.append("chatcmpl-" + response["id"].removeprefix("resp_"))
    text = await answered(http, "/v1/completions", {"model": MODEL, "prompt": "a", "store": True})
    ids += ["chatcmpl-" + text["id"].removeprefix("cmpl-"), "chatcmpl-x", "x"]
    for id_ in ids:
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
            answer = await http.request(method, f"{PATH}/{id_}{rest}")
            assert error_of(answer) == (404, None, "completion_not_found")
    assert await ids_of(http) == []
    chat = await stored(http)
    answer = await http.get("/v1/responses/resp_" + chat.removeprefix("chatcmpl-"))
    assert error_of(answer) == (404, None, "response_not_found")
    assert (await http.get(PATH, params={"after": ids[0]})).status_code == 400


async def test_metadata_of_a_chat_that_is_not_stored_is_ignored(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """What a stored one may have is bounded."""
    long = {"a" * 65: "b", "c": "d" * 513}
    answer = await http.post(PATH, json=BODY | {"store": False, "metadata": long})
    assert answer.headers["x-ignored-parameters"] == "metadata"
    for name, value in ("a" * 65, "b"), ("c", "d" * 513), ("", "x"):
        answer = await http.post(PATH, json=BODY | {"metadata": {name: value}})
        assert error_of(answer) == (400, "metadata", "invalid_value")


async def test_it_is_kept_as_a_job_is(http: httpx.AsyncClient, idle_worker: FakeWorker) -> None:
    """From its end, and then gone, from the list too."""
    clock, now_ms = idle_worker.client, 1_700_000_000_000
    await clock.set(TEST_CLOCK, f"={now_ms}")
    call = asyncio.create_task(http.post(PATH, json=BODY))
    await idle_worker.run(await idle_worker.claim())
    id_ = (await call).json()["id"]
    record = idle_worker.keys.of("job", "job-" + id_.removeprefix("chatcmpl-"))
    assert 86_000 < await clock.ttl(record) <= 86_400
    await clock.set(TEST_CLOCK, f"={now_ms + 86_399_000}")
    assert await ids_of(http) == [id_]
    await clock.set(TEST_CLOCK, f"={now_ms + 86_401_000}")

    async def is_gone() -> bool:  # a gateway sweeps once a second
        return await ids_of(http) == []

    await until(is_gone)
    assert (await http.get(f"{PATH}/{id_}")).status_code == 404
    assert await clock.keys(idle_worker.keys.of("chats", "*")) == []


async def test_one_without_an_answer_is_only_deleted(
    http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """While it runs, and after it has failed."""
    for ends in (False, True):
        headers = {"prefer": "respond-async"}
        job = (await http.post(PATH, json=BODY, headers=headers)).json()["id"]
        id_ = "chatcmpl-" + job.removeprefix("job-")
        claimed = await idle_worker.claim()
        if ends:
            await idle_worker.finish(claimed, 1, "engine_error", "it")
        assert (await http.get(f"{PATH}/{id_}")).status_code == 404
        assert await ids_of(http) == []
        assert (await http.delete(f"{PATH}/{id_}")).json()["deleted"] is True
        assert (await http.get(f"/v1/jobs/{job}")).status_code == 404
        if not ends:
            assert await idle_worker.beat(claimed) == [claimed.job.id]


async def test_another_tenant_s_chat_is_not_found(
    http: httpx.AsyncClient, worker: FakeWorker, bearer: Bearer
) -> None:
    """A key needs the scopes of jobs; without jobs:write it deletes none."""
    own, foreign = await bearer("acme"), await bearer("evil")
    reader = await bearer("acme", scopes=("jobs:read",))
    caller = await bearer("acme", scopes=("inference",))
    id_ = (await http.post(PATH, json=BODY, headers=own)).json()["id"]
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
        answer = await http.request(method, f"{PATH}/{id_}{rest}", headers=foreign)
        assert error_of(answer) == (404, None, "completion_not_found")
        answer = await http.request(method, f"{PATH}/{id_}{rest}", headers=caller)
        assert answer.status_code == 403
    assert (await http.get(PATH, headers=foreign)).json()["data"] == []
    assert (await http.get(PATH, params={"after": id_}, headers=foreign)).status_code == 400
    assert (await http.get(PATH, headers=caller)).status_code == 403
    assert (await http.delete(f"{PATH}/{id_}", headers=reader)).status_code == 403
    assert (await http.get(f"{PATH}/{id_}", headers=reader)).json()["id"] == id_


async def test_jobs_are_stored_chats_too(http: httpx.AsyncClient, worker: FakeWorker) -> None:
    """With the metadata of both; another gateway reads them."""
    asked = {"endpoint": PATH, "body": BODY | {"metadata": {"a": "1", "b": "1"}}}
    answer = await http.post("/v1/jobs", json=asked | {"metadata": {"b": "2"}})
    id_ = "chatcmpl-" + answer.json()["id"].removeprefix("job-")

    async def is_listed() -> bool:
        return await ids_of(http, **{"metadata[a]": "1", "metadata[b]": "2"}) == [id_]

    await until(is_listed)


async def test_long_requests_are_in_the_object_store(
    gateways: Gateways, worker: FakeWorker, tmp_path: Path
) -> None:
    """And their answers; a deletion removes both."""
    async with gateways(object_store=str(tmp_path), object_min_bytes=64) as storing:
        id_ = await stored(storing, messages=[{"role": "user", "content": "x" * 100}])
        assert worker.seen[0].response == b""
        page = (await storing.get(f"{PATH}/{id_}/messages")).json()
        assert page["data"][0]["content"] == "x" * 100
        assert await ids_of(storing) == [id_]
        job_id = "job-" + id_.removeprefix("chatcmpl-")
        assert has_object(tmp_path, job_id)
        await storing.delete(f"{PATH}/{id_}")
        assert not has_object(tmp_path, job_id)


async def test_a_page_of_long_answers_is_short(
    http: httpx.AsyncClient, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But each has one, and all are found."""
    monkeypatch.setattr("gateway.routes.chats._PAGE_BYTES", 700)
    ids = [await stored(http) for _ in range(4)]
    seen, after = list[str](), dict[str, str]()
    while True:
        page = (await http.get(PATH, params=after)).json()
        seen += [chat["id"] for chat in page["data"]]
        assert 1 <= len(page["data"]) < 4
        assert page["last_id"] == seen[-1]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ids


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "x=1", "limit=1&limit=2"])
async def test_a_list_refuses_what_it_does_not_know(http: httpx.AsyncClient, query: str) -> None:
    assert (await http.get(f"{PATH}?{query}")).status_code == 400


async def test_a_chat_outlives_its_worker_and_its_gateway(
    http: httpx.AsyncClient, redis_server: EmbeddedRedis, idle_worker: FakeWorker
) -> None:
    """Half of a stream from one worker, the rest from another; read at another gateway."""
    async with gateway_client(redis_server.url) as first:
        body = BODY | {"stream": True, "on_disconnect": "continue"}
        async with first.stream("POST", PATH, json=body) as answer:
            claimed = await idle_worker.claim()
            script = says("Hello", " wörld", "!")(claimed.job)
            await idle_worker.say(claimed, 1, script[0])
            id_ = (await anext(events_of(answer))).data["id"]
    await idle_worker.functions.release(
        idle_worker.incarnation, [Release(claimed.job.id, claimed.epoch, "drain")]
    )
    again = await idle_worker.claim()
    for number, event in enumerate(script[1:], 2):
        await idle_worker.say(again, number, event)
    await idle_worker.finish(again, len(script) + 1)
    found = (await http.get(f"{PATH}/{id_}")).json()
    assert found["choices"][0]["message"]["content"] == "Hello wörld!"
    assert await ids_of(http) == [id_]
