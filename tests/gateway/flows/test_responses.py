"""`/v1/responses` of flows, whose members get a chat."""

import httpx
import openai
import pytest

from contract.jobs import JobStatus
from tests.fleet import until
from tests.gateway.flows.conftest import Fleet

pytestmark = pytest.mark.anyio


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
