"""Streams of flows, and who runs them: a stream goes on where the process that runs the flow has
died."""

import asyncio
import subprocess

import httpx
import pytest

from contract.functions import Functions
from contract.jobs import JobStatus
from tests.clock import TEST_CLOCK, library_with_test_clock
from tests.fleet import until
from tests.gateway.conftest import Gateways
from tests.gateway.fake_worker import says
from tests.gateway.flows.conftest import Fleet, answer_of, chat, until_live
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio


@pytest.mark.campaign
@pytest.mark.parametrize("flow", ["cascade", "pipe"])
async def test_a_stream_goes_on_after_the_process_that_ran_the_flow_was_killed(
    runner: subprocess.Popen[str],
    http: httpx.AsyncClient,
    runners: Gateways,
    fleet: Fleet,
    flow: str,
) -> None:
    """No token is lost or said twice, and each model is called once."""
    large = fleet.workers["large"]
    await fleet.stop_serving("large")
    said = b""
    await until_live(fleet, flow)

    async def read() -> None:
        nonlocal said
        body = chat(flow, stream=True, max_tokens=60)
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for part in answer.aiter_bytes():
                said += part

    async def has_begun() -> bool:
        return b"one " in said

    reading = asyncio.create_task(read())
    claimed = await large.claim()
    first, second, third = says("one ", "two ", "three")(claimed.job)
    await large.say(claimed, 1, first)
    await until(has_begun)
    runner.kill()
    await large.say(claimed, 2, second)
    await large.say(claimed, 3, third)
    await large.finish(claimed, 4)
    async with runners():
        await fleet.client.function_load(library_with_test_clock(), replace=True)
        await fleet.client.set(TEST_CLOCK, 11_000)  # the killed process's lease has lapsed
        await fleet.beat()
        await reading
    chunks = [event.data["choices"][0]["delta"] for event in whole_stream(said)]
    assert [text for chunk in chunks if (text := chunk.get("content"))] == ["one ", "two ", "three"]
    assert [len(fleet.workers[name].seen) for name in ("small", "large")] == [1, 1]


async def test_a_gateway_that_ends_hands_its_flows_on(
    http: httpx.AsyncClient, runners: Gateways, fleet: Fleet, functions: Functions
) -> None:
    """At once, and no attempt is counted."""
    large = fleet.workers["large"]
    await fleet.stop_serving("large")
    async with runners():
        await until_live(fleet, "cascade")
        call = asyncio.create_task(http.post("/v1/chat/completions", json=chat("cascade")))
        claimed = await large.claim()
    parent = await functions.read(claimed.job.parent, "default")
    assert parent is not None
    assert parent[0].status is JobStatus.QUEUED
    await large.run(claimed, says("I am large"))
    async with runners():
        answer = await call
    assert answer_of(answer) == "I am large"
    job = (await http.get(f"/v1/jobs/{claimed.job.parent}")).json()
    assert job["attempt"] == 1


async def test_a_stream_is_kept_alive_before_its_deciding_call(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    """Its headers name the models until then, its job all of them."""
    await fleet.stop_serving("small")
    body = chat("cascade", stream=True)
    async with flows.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["x-batchway-models"] == "small"
        lines = answer.aiter_lines()
        assert await anext(lines) == ""  # nothing has been said
        small = fleet.workers["small"]
        await small.run(await small.claim())
        text = [line async for line in lines if line]
    assert text[-1] == "data: [DONE]"
    job = (await flows.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
    assert [member["model"] for member in job["members"]] == ["small", "large"]
