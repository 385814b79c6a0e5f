"""`/v1/responses` of flows, whose members get a chat."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from contract.jobs import JobStatus
from tests.fleet import until
from tests.gateway.fake_worker import says
from tests.gateway.flows.conftest import Fleet

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(flows: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{flows.base_url}/v1", api_key="none", max_retries=0
    ) as found:
        yield found


@pytest.mark.parametrize(
    ("model", "models"),
    [
        ("router", "large"),
        ("cascade", "small, large"),
        ("vote", "small, large, third"),
        ("pipe", "small, large"),
        ("nested", "cascade, third"),
    ],
)
async def test_the_official_client_reads_every_kind_whole_and_as_a_stream(
    client: openai.AsyncOpenAI, fleet: Fleet, model: str, models: str
) -> None:
    fleet.say("large", says("I am", " lar", "ge"))
    fleet.say("third", says("I am large"))
    whole = await client.responses.with_raw_response.create(model=model, input="a hard one")
    response = whole.parse()
    assert whole.headers["x-batchway-models"] == models
    assert (response.model, response.status, response.output_text) == (
        model,
        "completed",
        "I am large",
    )
    assert await client.responses.retrieve(response.id) == response
    async with client.responses.stream(model=model, input="a hard one") as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (streamed.model, streamed.output_text) == (model, "I am large")
    assert streamed.usage == response.usage


async def test_a_chain_goes_from_a_flow_to_a_model(
    client: openai.AsyncOpenAI, fleet: Fleet
) -> None:
    first = await client.responses.create(model="cascade", input="hello")
    await client.responses.create(model="third", input="and?", previous_response_id=first.id)
    [asked] = fleet.workers["third"].seen
    said = "user: hello\nassistant: I am large\nuser: and?\nassistant: "
    assert bytes(asked.prompt_ids).decode() == said


async def test_cancel_and_delete_reach_the_members(
    client: openai.AsyncOpenAI, flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    await fleet.stop_serving("small")
    response = await client.responses.create(model="pipe", input="hello", background=True)
    claimed = await fleet.workers["small"].claim()
    assert (await client.responses.cancel(response.id)).status == "cancelled"
    member = (await flows.get(f"/v1/jobs/{claimed.job.id}")).json()
    assert member["status"] == JobStatus.CANCELLED
    await client.responses.delete(response.id)

    async def is_gone() -> bool:
        return (await flows.get(f"/v1/jobs/{claimed.job.id}")).status_code == 404

    await until(is_gone)


async def test_a_pipeline_reads_the_documents_of_a_response(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    body = {"input": "hello", "documents": ["a"]}
    assert (await flows.post("/v1/responses", json={"model": "pipe", **body})).status_code == 200
    refused = await flows.post("/v1/responses", json={"model": "small", **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
