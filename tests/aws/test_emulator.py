"""ApiFunction in Lambda's own emulator: awslambdaric and our handler."""

import json
from collections.abc import AsyncIterator

import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.aws.emulator import EMULATOR, Emulator, emulating
from tests.aws.lambda_events import (
    KEY,
    event_bus_event,
    given_up,
    http_event,
    rest_event,
    sns_event,
    sqs_event,
)
from tests.gateway.fake_worker import MODEL, FakeWorker

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not EMULATOR.exists(), reason="no aws-lambda-rie: scripts/setup says why"),
]

JOB = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
CALL = {"model": MODEL, "prompt": "ab", "seed": 1}


def environ(redis_server: EmbeddedRedis) -> dict[str, str]:
    """A function's environment variables."""
    return {
        "REDIS_URL": redis_server.url,
        "BATCHWAY_NAMESPACE": "test",
        "BATCHWAY_API_KEY": KEY,
        "BATCHWAY_POLL_S": "0.05",
    }


@pytest.fixture
async def api_function(redis_server: EmbeddedRedis) -> AsyncIterator[Emulator]:
    command = ["-m", "awslambdaric"]
    async with emulating(
        command, environ(redis_server), handler="gateway.aws.handler.handler"
    ) as emulator:
        yield emulator


async def test_both_api_formats_reach_the_function(
    api_function: Emulator, idle_worker: FakeWorker
) -> None:
    """Submit, status, cancel and errors, in the formats of REST and HTTP APIs."""
    refused = await api_function.invoke(rest_event("POST", "/v1/jobs", JOB, {"Authorization": ""}))
    submitted = (await api_function.invoke(rest_event("POST", "/v1/jobs", JOB))).json()
    job_id = json.loads(submitted["body"])["id"]
    read = (await api_function.invoke(http_event("GET", f"/v1/jobs/{job_id}"))).json()
    path = f"/v1/jobs/{job_id}/cancel"
    cancelled = (await api_function.invoke(rest_event("POST", path))).json()
    unknown = (await api_function.invoke(http_event("GET", "/v1/models/none"))).json()

    assert refused.json()["statusCode"] == 401
    assert (submitted["statusCode"], read["statusCode"]) == (202, 200)
    assert json.loads(read["body"])["status"] == "queued"
    assert json.loads(cancelled["body"])["status"] == "cancelled"
    assert unknown["statusCode"] == 404


async def test_calls_and_direct_invocations_are_answered(
    api_function: Emulator, worker: FakeWorker
) -> None:
    """A buffered call through API Gateway, then a direct invocation with a job."""
    called = (await api_function.invoke(rest_event("POST", "/v1/completions", CALL))).json()
    invoked = (await api_function.invoke(JOB)).json()

    assert json.loads(called["body"])["choices"][0]["text"] == "Hello wörld!"
    assert invoked["statusCode"] == 202
    assert invoked["body"]["object"] == "job"


async def test_events_that_were_not_accepted_are_errors(
    api_function: Emulator, idle_worker: FakeWorker
) -> None:
    """Lambda sees a failed invocation, and tries again; of messages it is told which failed."""
    text, bad = json.dumps(JOB), {"endpoint": "/v1/completions", "body": {"model": "none"}}
    for event in (event_bus_event("1", JOB), sns_event("1", text), JOB):
        assert (await api_function.invoke(event)).json()["statusCode"] == 202
    for event in (event_bus_event("2", bad), sns_event("2", json.dumps(bad)), bad):
        failed = (await api_function.invoke(event)).json()
        assert failed["errorType"] == "JobRefused"
        assert json.loads(failed["errorMessage"])["statusCode"] in (400, 404)
    messages = sqs_event(("a", text), ("b", json.dumps(bad)), ("c", json.dumps(given_up(JOB, "3"))))
    answer = (await api_function.invoke(messages)).json()
    assert answer == {"batchItemFailures": [{"itemIdentifier": "b"}]}
