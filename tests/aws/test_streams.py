"""Streams on Lambda, with the settings of template.yaml on a clock that runs 150 times as fast."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from gateway.settings import GatewaySettings, variable
from infra.embedded_redis import EmbeddedRedis
from tests.aws.template import of_type, variables
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_jobs import events_of

pytestmark = pytest.mark.anyio

FASTER = 150
MINUTE_S = 60 / FASTER
NAMES = ("sync_deadline_s", "sync_limit_s")


def seconds_of(function: str) -> dict[str, float]:
    """What a function is given, or the setting's default."""
    given = variables(function)
    defaults = {name: GatewaySettings.model_fields[name].default for name in NAMES}
    return {name: float(given.get(variable(name), defaults[name])) for name in NAMES}


@pytest.fixture
def stream_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """What runs behind the Web Adapter."""
    scaled = {name: seconds / FASTER for name, seconds in seconds_of("StreamFunction").items()}
    with running_gateway(make_settings(redis_server.url, **scaled)) as url:
        yield url


async def talk(worker: FakeWorker, minutes: int) -> None:
    """Runs a job that outputs a text each minute from now on."""
    clock = asyncio.get_running_loop().time
    start_s = clock()
    claimed = await worker.claim()
    for number, event in enumerate(says(*"a" * minutes)(claimed.job), 1):
        await asyncio.sleep(max(0.0, start_s + number * MINUTE_S - clock()))
        await worker.say(claimed, number, event)
    await worker.finish(claimed, minutes + 1)


async def test_a_stream_of_14_minutes_is_whole(stream_url: str, idle_worker: FakeWorker) -> None:
    """Neither its deadline nor the platform's limit ends it."""
    common = {"model": MODEL, "stream": True}
    async with httpx.AsyncClient(base_url=stream_url, timeout=20) as http:
        talking = [asyncio.create_task(talk(idle_worker, 14)) for _ in range(2)]
        completion, response = await asyncio.gather(
            http.post("/v1/completions", json=common | {"prompt": "ab"}),
            http.post("/v1/responses", json=common | {"input": "ab"}),
        )
        await asyncio.gather(*talking)
    *texts, last, done = events_of(completion.text)
    assert len(texts) == 13
    assert (done, '"finish_reason":"stop"' in last) == ("data: [DONE]", True)
    *_, last, done = events_of(response.text)
    assert last.strip().startswith("event: response.completed"), last


async def test_a_longer_stream_becomes_a_job_before_the_function_ends(
    stream_url: str, idle_worker: FakeWorker
) -> None:
    """The end of its time names where it goes on."""
    async with httpx.AsyncClient(base_url=stream_url, timeout=20) as http:
        talking = asyncio.create_task(talk(idle_worker, 17))
        body = {"model": MODEL, "prompt": "ab", "stream": True, "max_tokens": 64}
        answer = await http.post("/v1/completions", json=body)
        *_, reconnect, done = events_of(answer.text)
        assert (reconnect.strip().split("\n")[0], done) == ("event: reconnect", "data: [DONE]")
        became = json.loads(reconnect.split("data: ")[1])
        position = {"last-event-id": became["last_event_id"]}
        rest = await http.get(became["events_url"], headers=position)
        await talking
    assert "event: succeeded" in rest.text


async def test_the_events_of_a_long_job_end_before_the_function_does(
    stream_url: str, idle_worker: FakeWorker
) -> None:
    """With the place where their reader goes on."""
    async with httpx.AsyncClient(base_url=stream_url, timeout=20) as http:
        job = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
        response = {"model": MODEL, "input": "ab", "background": True}
        job_id = (await http.post("/v1/jobs", json=job)).json()["id"]
        response_id = (await http.post("/v1/responses", json=response)).json()["id"]
        async with asyncio.timeout(16 * MINUTE_S):
            of_job, of_response = await asyncio.gather(
                http.get(f"/v1/jobs/{job_id}/events"),
                http.get(f"/v1/responses/{response_id}?stream=true"),
            )
    assert "event: reconnect" in events_of(of_job.text)[-1]
    assert '"code":"became_job"' in events_of(of_response.text)[-2]


@pytest.mark.parametrize("function", ["StreamFunction", "StreamInstancesFunction"])
def test_the_limits_of_a_stream_agree(function: str) -> None:
    """A call becomes a job before its deadline, and before Lambda and API Gateway end it."""
    found = seconds_of(function)
    timeout_s = of_type("AWS::Lambda::Function")[function]["Timeout"]
    assert 14 * 60 < found["sync_limit_s"] < min(found["sync_deadline_s"], timeout_s) - 5
    [api] = of_type("AWS::ApiGateway::RestApi").values()
    waits = {
        method["x-amazon-apigateway-integration"]["timeoutInMillis"]
        for path in api["Body"]["paths"].values()
        for method in path.values()
        if method["x-amazon-apigateway-integration"].get("responseTransferMode") == "STREAM"
    }
    assert min(waits) >= 1_000 * timeout_s
