"""Streams of flows, and who runs them: a stream goes on where the process that runs the flow has
died."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK, library_with_test_clock
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import says
from tests.gateway.flows.conftest import Fleet, chat, is_live

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(flows: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{flows.base_url}/v1", api_key="none", max_retries=0
    ) as found:
        yield found


@pytest.mark.parametrize("model", ["router", "cascade", "vote", "pipe", "nested"])
async def test_the_official_client_reads_every_kind_as_a_stream(
    client: openai.AsyncOpenAI, fleet: Fleet, model: str
) -> None:
    fleet.say("large", says("I am", " lar", "ge"))
    fleet.say("third", says("I am large"))
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "a hard one"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "I am large"
    assert stream.response.headers["x-batchway-models"].split(", ")[-1] in ("large", "third")
    usage = chunks[-1].usage
    assert usage is not None
    job_id = stream.response.headers["x-job-id"]
    job = (await client.get(f"/jobs/{job_id}", cast_to=httpx.Response)).json()
    assert usage.total_tokens == sum(m["usage"]["total_tokens"] for m in job["members"])


@pytest.mark.campaign
@pytest.mark.parametrize("flow", ["cascade", "pipe"])
async def test_a_stream_goes_on_after_the_process_that_ran_the_flow_was_killed(
    runner: subprocess.Popen[str],
    http: httpx.AsyncClient,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    fleet: Fleet,
    models_yaml: Path,
    flow: str,
) -> None:
    """No token is lost or said twice, and each model is called once."""
    large = fleet.workers["large"]
    await fleet.stop_serving("large")
    texts: list[str] = []
    await until(lambda: is_live(redis_client, keys, flow))
    await fleet.beat()

    async def read() -> None:
        body = chat(flow, stream=True, max_tokens=60)
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                texts.extend([line])

    async def has_begun() -> bool:
        return "one " in "".join(texts)

    reading = asyncio.create_task(read())
    claimed = await large.claim()
    first, second, third = says("one ", "two ", "three")(claimed.job)
    await large.say(claimed, 1, first)
    await until(has_begun)
    runner.kill()
    await large.say(claimed, 2, second)
    await large.say(claimed, 3, third)
    await large.finish(claimed, 4)
    settings = make_settings(redis_server.url, models=str(models_yaml))
    with running_gateway(settings):
        await redis_client.function_load(library_with_test_clock(), replace=True)
        await redis_client.set(TEST_CLOCK, 11_000)  # the killed process's lease has lapsed
        await fleet.beat()
        await reading
    contents = [line for line in texts if '"content":"' in line and '"content":""' not in line]
    said = [line.split('"content":"')[1].split('"')[0] for line in contents]
    assert said == ["one ", "two ", "three"]
    assert texts[-2:] == ["data: [DONE]", ""]
    assert [len(fleet.workers[name].seen) for name in ("small", "large")] == [1, 1]


async def test_a_gateway_that_ends_hands_its_flows_on(
    http: httpx.AsyncClient,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    fleet: Fleet,
    models_yaml: Path,
    functions: Functions,
) -> None:
    """At once, and no attempt is counted."""
    large = fleet.workers["large"]
    await fleet.stop_serving("large")
    settings = make_settings(redis_server.url, models=str(models_yaml))
    with running_gateway(settings):
        await until(lambda: is_live(redis_client, keys, "cascade"))
        call = asyncio.create_task(http.post("/v1/chat/completions", json=chat("cascade")))
        claimed = await large.claim()
    parent = await functions.read(claimed.job.parent, "default")
    assert parent is not None
    assert parent[0].status is JobStatus.QUEUED
    await large.run(claimed, says("I am large"))
    with running_gateway(settings):
        answer = await call
    assert answer.json()["choices"][0]["message"]["content"] == "I am large"
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
