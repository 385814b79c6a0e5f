"""ApiFunction: each kind of event reaches the app, and is answered in the format of its sender."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from contract.function_types import Append
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.payloads.directory import DirectoryStore
from contract.payloads.encoding import encode_result
from contract.payloads.store import result_key
from gateway.aws import handler
from gateway.aws.environment import load_settings
from gateway.aws.intake import JobRefused
from gateway.settings import GatewaySettings
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Invoke, running_function
from tests.aws.emulator import EMULATOR, Emulator, emulating, function_environ
from tests.aws.lambda_events import (
    KEY,
    event_bus_event,
    given_up,
    http_event,
    rest_event,
    sns_event,
    sqs_event,
)
from tests.gateway.conftest import make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

COMPLETION = {"model": MODEL, "prompt": "ab"}
JOB = {"endpoint": "/v1/completions", "body": COMPLETION}
needs_emulator = pytest.mark.skipif(
    not EMULATOR.exists(), reason="no aws-lambda-rie: scripts/setup says why"
)
BOTH = pytest.mark.parametrize("event", [rest_event, http_event], ids=["rest", "http"])
Event = Callable[..., dict[str, Any]]


@BOTH
async def test_a_completion_is_answered_whole(
    event: Event, invoke: Invoke, worker: FakeWorker
) -> None:
    """As text, with its headers, in the format of the gateway_client API."""
    answer = await invoke(event("POST", "/v1/completions", COMPLETION))

    assert answer["statusCode"] == 200
    assert answer["headers"]["content-type"] == "application/json"
    assert answer["headers"]["x-job-id"] == worker.seen[0].id
    assert not answer["isBase64Encoded"]
    assert json.loads(answer["body"])["choices"][0]["text"] == "Hello wörld!"


@BOTH
async def test_a_job_is_submitted_read_and_cancelled(
    event: Event, invoke: Invoke, idle_worker: FakeWorker
) -> None:
    """Three invocations of one environment, which keeps its connections between them."""
    submitted = await invoke(event("POST", "/v1/jobs", JOB))
    job_id = json.loads(submitted["body"])["id"]
    read = await invoke(event("GET", f"/v1/jobs/{job_id}"))
    cancelled = await invoke(event("POST", f"/v1/jobs/{job_id}/cancel"))

    assert submitted["statusCode"] == 202
    assert submitted["headers"]["location"] == f"/v1/jobs/{job_id}"
    assert json.loads(read["body"])["status"] == "queued"
    assert json.loads(cancelled["body"])["status"] == "cancelled"


@BOTH
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/completions", {"model": MODEL}, 400, "missing_required_parameter"),
        ("POST", "/v1/completions", {"model": "none", "prompt": "a"}, 404, "model_not_found"),
        ("GET", "/v1/jobs/job-0-" + "0" * 32, None, 404, "job_not_found"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
    ],
)
async def test_an_error_keeps_its_status_and_format(
    event: Event,
    method: str,
    path: str,
    body: object,
    status: int,
    code: str,
    invoke: Invoke,
    idle_worker: FakeWorker,
) -> None:
    answer = await invoke(event(method, path, body))
    assert (answer["statusCode"], json.loads(answer["body"])["error"]["code"]) == (status, code)


async def test_a_job_body_is_submitted_without_http(
    invoke: Invoke, worker: FakeWorker, functions: Functions
) -> None:
    """`lambda.invoke` with a body of POST /v1/jobs, with and without headers."""
    event = JOB | {"headers": {"Idempotency-Key": "once"}}
    first, second = await invoke(event), await invoke(event)
    wrong = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "a", "n": 9}}
    with pytest.raises(JobRefused) as refused:
        await invoke(wrong)
    answer = json.loads(str(refused.value))

    assert first["statusCode"] == second["statusCode"] == 202
    assert first["body"]["id"] == second["body"]["id"] == first["headers"]["x-job-id"]
    assert answer["statusCode"] == 400
    assert answer["body"]["error"]["param"] == "body.n"


async def test_rejected_messages_stay_in_the_queue(
    invoke: Invoke, idle_worker: FakeWorker, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Accepted messages of the same batch do not. Redelivery of an accepted message creates no
    second job."""
    event = sqs_event(("m1", json.dumps(JOB)), ("m2", "no JSON"), ("m3", json.dumps(JOB)))
    first, second = await invoke(event), await invoke(event)

    assert first == second == {"batchItemFailures": [{"itemIdentifier": "m2"}]}
    counters = await redis_client.hgetall(keys.of("counters", MODEL, "standard"))
    assert counters[b"queued_jobs"] == b"2"


async def test_message_attributes_become_headers(invoke: Invoke, idle_worker: FakeWorker) -> None:
    """An API key in them is checked as any other; the sender's idempotency key takes precedence."""
    body = json.dumps(JOB)
    stranger = await invoke(sqs_event(("m1", body), Authorization="Bearer " + "x" * 32))
    named = await invoke(sqs_event(("m2", body), **{"Idempotency-Key": "a", "Authorization": KEY}))
    taken = await invoke(sqs_event(("m3", body), **{"Idempotency-Key": "a"}))

    assert stranger["batchItemFailures"] == [{"itemIdentifier": "m1"}]
    assert named["batchItemFailures"] == [{"itemIdentifier": "m2"}]  # no bearer
    assert taken["batchItemFailures"] == []


async def test_a_call_becomes_a_job_before_the_function_times_out(
    invoke: Invoke, idle_worker: FakeWorker
) -> None:
    """Lambda tells the remaining time; the response says where to read the job."""

    class Context:
        def get_remaining_time_in_millis(self) -> int:
            return 2_300

    answer = await invoke(rest_event("POST", "/v1/completions", COMPLETION), Context())
    assert answer["statusCode"] == 202
    assert json.loads(answer["body"])["object"] == "job"


async def test_a_result_that_is_longer_than_an_answer_is_only_named(
    redis_server: Any,
    idle_worker: FakeWorker,
    functions: Functions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lambda would answer 502. The object store's URL is beside it."""
    settings = make_settings(redis_server.url, api_key=KEY, object_store=str(tmp_path))
    async with running_function(settings) as invoke:
        job_id = (await invoke(JOB))["body"]["id"]
        claimed = await idle_worker.claim()
        events = says("a", "b")(claimed.job)
        for number, event in enumerate(events, 1):
            await idle_worker.say(claimed, number, event)
        found = await functions.read(job_id, claimed.job.tenant, max_events=10)
        assert found is not None
        data = encode_result(claimed.job, found[1])
        ref = DirectoryStore(tmp_path).put(result_key(job_id, claimed.epoch), data)
        end = Append(job_id, claimed.epoch, 3, fin=JobStatus.SUCCEEDED, result=ref)
        await functions.append(idle_worker.incarnation, [end], lease_s=10.0)

        asked = rest_event("GET", f"/v1/jobs/{job_id}")
        whole = json.loads((await invoke(asked))["body"])
        assert whole["result"]["choices"][0]["text"] == "ab"
        monkeypatch.setattr(handler, "_ANSWER_BYTES", 1_000)
        short = json.loads((await invoke(asked))["body"])
    assert (short["status"], short["result"]) == ("succeeded", None)
    assert short["result_url"].startswith("/v1/objects/")


async def test_the_entry_point_reads_its_settings_once(
    worker: FakeWorker, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first invocation, so that a snapshot contains no settings."""
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    monkeypatch.setenv("BATCHWAY_NAMESPACE", "test")
    monkeypatch.setenv("BATCHWAY_API_KEY", KEY)
    assert handler._function is None

    def run() -> list[int]:
        first = handler.handler(rest_event("GET", "/livez"), None)
        monkeypatch.delenv("REDIS_URL")
        second = handler.handler(rest_event("GET", "/readyz"), None)
        assert handler._function is not None
        handler._function.close()
        handler._function = None
        return [first["statusCode"], second["statusCode"]]

    assert await asyncio.to_thread(run) == [200, 200]


def test_functions_do_nothing_between_invocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variable says; other gateways do."""
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    for name in ("feeds_batches", "warms_next_turn"):
        monkeypatch.setenv(f"BATCHWAY_{name.upper()}", "1")
        assert not getattr(load_settings(), name)
        assert getattr(GatewaySettings.from_env(), name)


# --- in Lambda's own emulator: awslambdaric and our handler ------------------------------------


@pytest.fixture
async def api_function(redis_server: EmbeddedRedis) -> AsyncIterator[Emulator]:
    async with emulating(function_environ(redis_server.url)) as emulator:
        yield emulator


@needs_emulator
async def test_calls_and_direct_invocations_are_answered(
    api_function: Emulator, worker: FakeWorker
) -> None:
    """In the formats of REST and HTTP APIs."""
    call = {"model": MODEL, "prompt": "ab", "seed": 1}
    called = (await api_function.invoke(rest_event("POST", "/v1/completions", call))).json()
    unknown = (await api_function.invoke(http_event("GET", "/v1/models/none"))).json()
    refused = await api_function.invoke(rest_event("POST", "/v1/jobs", JOB, {"Authorization": ""}))
    invoked = (await api_function.invoke(JOB)).json()

    assert json.loads(called["body"])["choices"][0]["text"] == "Hello wörld!"
    assert (unknown["statusCode"], refused.json()["statusCode"]) == (404, 401)
    assert (invoked["statusCode"], invoked["body"]["object"]) == (202, "job")


@needs_emulator
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
