"""Responses that are kept: in the background, resumed, chained, cancelled, deleted, of a tenant."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from contract.events import ChoiceDelta, Tokens, ToolCallDelta
from contract.function_types import Claimed
from contract.jobs import FinishReason, Job
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import output_text
from tests.fleet import until
from tests.gateway.conftest import Bearer, Gateways, answered, gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_losses import lose_event
from tests.gateway.test_responses_api import BODY, TOOL, client, thinks_and_calls
from tests.streams import events_of

__all__ = ["client"]
pytestmark = pytest.mark.anyio


@pytest.fixture
async def other(redis_server: EmbeddedRedis, http: httpx.AsyncClient) -> AsyncIterator[Any]:
    """A client of a second gateway on the same Redis."""
    async with gateway_client(redis_server.url) as client:
        yield client


async def created(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await answered(http, "/v1/responses", BODY, **fields)


def blocks_of(raw: str) -> list[str]:
    """The events of a stream, without heartbeats."""
    return [block for block in raw.lstrip("\n").split("\n\n") if block.strip()]


async def test_a_response_in_the_background_is_polled(
    client: AsyncOpenAI, idle_worker: FakeWorker
) -> None:
    """It is queued without a worker's help, then runs, then has its output."""
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert (response.status, response.output) == ("queued", [])
    claimed = await idle_worker.claim()
    assert (await client.responses.retrieve(response.id)).status == "in_progress"

    await idle_worker.run(claimed)

    ended = await client.responses.retrieve(response.id)
    assert (ended.status, ended.output_text) == ("completed", "Hello wörld!")


async def test_a_stream_goes_on_after_any_event_at_any_gateway(
    http: httpx.AsyncClient, other: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Cut after each event while the job runs, and read again after its end: the same bytes."""
    idle_worker.script = thinks_and_calls
    response = await created(http, background=True, tools=[TOOL])
    path = f"/v1/responses/{response['id']}?stream=true"
    claimed = await idle_worker.claim()
    seen: list[str] = []  # event n is seen by the stream that starts after n - 1
    gateways = [http, other]
    running = asyncio.create_task(slowly(idle_worker, claimed))
    while not seen or "response.completed" not in seen[-1]:
        after = f"&starting_after={len(seen) - 1}" if seen else ""
        async with gateways[len(seen) % 2].stream("GET", path + after) as answer:
            seen.append(await first_block(answer))
    await running

    whole = blocks_of((await http.get(path)).text)
    assert seen == whole[:-1]
    assert whole[-1] == "data: [DONE]"
    for number in range(len(seen)):
        rest = await gateways[number % 2].get(f"{path}&starting_after={number}")
        assert blocks_of(rest.text) == whole[number + 1 :]


async def slowly(worker: FakeWorker, claimed: Claimed) -> None:
    """Runs a job with pauses in which its readers come and go."""
    events = worker.script(claimed.job)
    for number, event in enumerate(events, 1):
        await worker.say(claimed, number, event)
        await asyncio.sleep(0.05)
    await worker.finish(claimed, len(events) + 1)


async def first_block(answer: httpx.Response) -> str:
    raw = ""
    async for part in answer.aiter_text():
        raw += part
        if "\n\n" in raw.lstrip("\n"):
            return blocks_of(raw)[0]
    raise AssertionError("the stream has ended")


async def test_the_official_client_resumes_a_stream(
    client: AsyncOpenAI, idle_worker: FakeWorker
) -> None:
    """`retrieve` with `starting_after`, on a background stream that was cut."""
    stream = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    assert first.type == "response.created"
    await idle_worker.run(await idle_worker.claim())

    resumed = await client.responses.retrieve(
        first.response.id, stream=True, starting_after=first.sequence_number
    )
    events = [event async for event in resumed]

    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert [events[0].type, events[-1].type] == ["response.queued", "response.completed"]


async def test_a_stream_that_cannot_go_on_tells_every_client(
    client: AsyncOpenAI, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """As OpenAI's client reads it, which raises, and in the members of its event."""
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    claimed = await idle_worker.claim()
    first, second, third = says("a", "b", "c")(claimed.job)
    await idle_worker.say(claimed, 1, first)
    await idle_worker.say(claimed, 2, second)
    events = await client.responses.retrieve(response.id, stream=True)
    async with http.stream("GET", f"/v1/responses/{response.id}?stream=true") as answer:
        plain = events_of(answer)
        while (await anext(plain)).data.get("delta") != "b":
            pass
        while getattr(await anext(events), "delta", "") != "b":
            pass
        await lose_event(idle_worker, claimed.job.id, 2)
        await idle_worker.say(claimed, 2, third)
        with pytest.raises(openai.APIError) as raised:
            await anext(events)
        last = (await anext(plain)).data

    assert raised.value.code == last["code"] == "stream_reset"
    assert raised.value.body == last["error"]
    assert last == {
        **last["error"],
        "type": "error",
        "error": last["error"],
        "sequence_number": last["sequence_number"],
    }


async def test_a_background_response_is_cancelled(
    client: AsyncOpenAI, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Its output so far is kept; a second cancel changes nothing; its stream ends."""
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("Hel", "lo")(claimed.job)[0])

    cancelled = await client.responses.cancel(response.id)

    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    assert await client.responses.cancel(response.id) == cancelled
    assert await client.responses.retrieve(response.id) == cancelled
    raw = (await http.get(f"/v1/responses/{response.id}?stream=true")).text
    assert "event: response.cancelled" in blocks_of(raw)[-2]


async def test_only_background_responses_are_cancelled(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """Others end with their caller."""
    response = await client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(response.id)


async def test_a_deleted_response_is_gone(
    client: AsyncOpenAI, http: httpx.AsyncClient, idle_worker: FakeWorker
) -> None:
    """Also one that runs, which ends."""
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    claimed = await idle_worker.claim()

    deleted = await http.delete(f"/v1/responses/{response.id}")

    assert deleted.json() == {"id": response.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    assert await idle_worker.beat(claimed) == [claimed.job.id]


async def test_a_chain_goes_on_with_all_items(client: AsyncOpenAI, worker: FakeWorker) -> None:
    """Also after a response in its middle is deleted; instructions are not inherited."""
    first = await client.responses.create(model=MODEL, input="One", instructions="Be kind.")
    second = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    await client.responses.delete(first.id)
    worker.script = says("Third")
    third = await client.responses.create(
        model=MODEL, input="Three", previous_response_id=second.id
    )

    assert output_text(worker.seen[2].prompt_ids) == (
        "user: One\nassistant: Hello wörld!\nuser: Two\nassistant: Hello wörld!\n"
        "user: Three\nassistant: "
    )
    assert third.previous_response_id == second.id
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)


async def test_a_chain_does_not_go_on_from_what_has_not_ended_well(
    client: AsyncOpenAI, idle_worker: FakeWorker
) -> None:
    """A response that runs, or was cancelled."""
    response = await client.responses.create(model=MODEL, input="One", background=True)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.responses.create(model=MODEL, input="x", previous_response_id=response.id)
    await client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await client.responses.create(model=MODEL, input="x", previous_response_id=response.id)


async def test_items_are_listed_and_referred_to_by_id(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """Items of a chain keep their ids, in pages of either order."""
    first = await client.responses.create(model=MODEL, input="One")
    second = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)

    page = await client.responses.input_items.list(second.id, limit=2, order="asc")
    items: list[Any] = [item async for item in page]

    assert [item.content[0].text for item in items] == ["One", "Hello wörld!", "Two"]
    assert items[1].id == first.output[0].id
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert (newest.data, newest.has_more) == (items[2:], True)
    given: Any = [{"type": "item_reference", "id": items[1].id}, {"role": "user", "content": "?"}]
    await client.responses.create(model=MODEL, input=given)
    assert output_text(worker.seen[-1].prompt_ids) == (
        "assistant: Hello wörld!\nuser: ?\nassistant: "
    )


async def test_another_tenant_s_response_is_not_found(
    other: httpx.AsyncClient, worker: FakeWorker, bearer: Bearer
) -> None:
    """By no route, and neither as the previous response nor by the id of an item."""
    own, foreign = await bearer("acme"), await bearer("evil")
    answer = await other.post("/v1/responses", json={**BODY, "background": True}, headers=own)
    id_ = answer.json()["id"]

    async def is_done() -> bool:
        found = await other.get(f"/v1/responses/{id_}", headers=own)
        return bool(found.json()["status"] == "completed")

    await until(is_done)
    item = (await other.get(f"/v1/responses/{id_}", headers=own)).json()["output"][0]["id"]
    paths = ("", "?stream=true", "/input_items")
    for method, path in (*(("GET", path) for path in paths), ("DELETE", ""), ("POST", "/cancel")):
        asked = await other.request(method, f"/v1/responses/{id_}{path}", headers=foreign)
        assert (asked.status_code, asked.json()["error"]["code"]) == (404, "response_not_found")
    fields: dict[str, Any]
    for fields, code in (
        ({"previous_response_id": id_}, "previous_response_not_found"),
        ({"input": [{"id": item}]}, "response_not_found"),
    ):
        asked = await other.post("/v1/responses", json={**BODY, **fields}, headers=foreign)
        assert (asked.status_code, asked.json()["error"]["code"]) == (404, code)


async def test_an_idempotency_key_finds_the_response(
    http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """The same body gets the same answer from one job, whose result it is."""
    headers = {"idempotency-key": "a"}
    answers = [await http.post("/v1/responses", json=BODY, headers=headers) for _ in range(2)]
    response = answers[0].json()
    assert response == answers[1].json()
    assert len(worker.seen) == 1
    job = (await http.get("/v1/jobs/job-" + response["id"].removeprefix("resp_"))).json()
    assert (job["endpoint"], job["result"]) == ("/v1/responses", response)


def has_object(folder: Path, job_id: str) -> bool:
    return any(folder.rglob(f"*{job_id}*/response"))


async def test_long_requests_are_in_the_object_store(
    gateways: Gateways, worker: FakeWorker, tmp_path: Path
) -> None:
    """A chain reads them there, and a deletion removes them."""
    async with gateways(object_store=str(tmp_path), object_min_bytes=64) as storing:
        first = await created(storing, input="x" * 100)
        assert worker.seen[0].response == b""
        second = await created(storing, input="y", previous_response_id=first["id"])
        assert await created(storing, input="y", previous_response_id=first["id"]) != second
        listed = await storing.get(f"/v1/responses/{second['id']}/input_items?order=asc")
        assert listed.json()["data"][0]["content"][0]["text"] == "x" * 100
        job_id = "job-" + first["id"].removeprefix("resp_")
        assert has_object(tmp_path, job_id)
        await storing.delete(f"/v1/responses/{first['id']}")
        assert not has_object(tmp_path, job_id)


def begins_a_call(_: Job) -> list[Tokens]:
    """A call that the limit of the output cuts off."""
    call = ToolCallDelta(0, "add", '{"a": ')
    delta = ChoiceDelta(0, 0, (97,), "", FinishReason.LENGTH, tool_calls=(call,))
    return [Tokens((delta,))]


async def test_a_conversation_goes_on_after_a_call_that_was_cut_off(
    client: AsyncOpenAI, worker: FakeWorker
) -> None:
    """After the earlier response, and with the item that refers to the call."""
    worker.script = begins_a_call
    response = await client.responses.create(model=MODEL, input="Hi", tools=[TOOL])
    [item] = response.output
    reference: Any = {"type": "item_reference", "id": item.id}
    continued: list[dict[str, Any]] = [
        {"input": "x", "previous_response_id": response.id},
        {"input": [{"role": "user", "content": "x"}, reference]},
    ]
    worker.script = says("Hello")
    for fields in continued:
        answer = await client.responses.create(model=MODEL, **fields)
        assert answer.status == "completed"
