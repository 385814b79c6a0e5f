"""One trace from the request to the callback, over real processes and OTLP, without content."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from contract.telemetry.tracing import Tracing
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.callbacks_process import callbacks_processes
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet, until
from tests.gateway.conftest import make_settings, running_gateway
from tests.telemetry.collector import Collector, running_collector

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CANARY = "canary-of-a-prompt"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """All parts started from now on send their spans there at once."""
    with running_collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


async def test_one_trace_spans_request_worker_and_callback(
    collector: Collector,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
) -> None:
    """The spans of gateway, worker and callbacks are below the caller's own. One span for all of
    decoding has statistics of its steps. No span has a prompt or output."""
    settings = make_settings(redis_server.url, callback_allow=("127.0.0.1",))
    model = HashModelOptions(eos_rate=0.0)
    body = {"model": "m", "prompt": f"{CANARY} " * 20, "max_tokens": 30}
    asked = {"endpoint": "/v1/completions", "body": body}
    with running_gateway(settings) as url:
        async with (
            Receiver({"/": always(Answer())}) as receiver,
            fleet(redis_server.url, 1, model, engine={"max_num_batched_tokens": 64}),
            callbacks_processes(redis_server.url, 1),
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            await Caller(functions, redis_client, keys).num_workers(1)
            asked["callback"] = {"url": receiver.url("/"), "secret": SECRET}
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            answer = await http.post("/v1/jobs", json=asked, headers=headers)
            answer.raise_for_status()

            async def are_delivered() -> bool:
                return bool(receiver.messages) and bool(collector.named("callback"))

            await until(are_delivered)
    spans = {span.name: span for span in collector.spans if span.trace_id == TRACE_ID}
    assert set(spans) == {
        "POST /v1/jobs", "queue", "text_completion m", "prefill", "decode", "publish", "callback",
    }  # fmt: skip
    head, run = spans["POST /v1/jobs"], spans["text_completion m"]
    assert head.parent_id == PARENT_ID
    for name in ("queue", "text_completion m", "callback"):
        assert spans[name].parent_id == head.span_id
    for name in ("prefill", "decode", "publish"):
        assert spans[name].parent_id == run.span_id
    assert {head.service, run.service, spans["callback"].service} == {
        "batchway-gateway", "batchway-worker", "batchway-callbacks",
    }  # fmt: skip
    assert spans["queue"].end_ns <= spans["prefill"].start_ns <= spans["prefill"].end_ns
    assert spans["prefill"].end_ns <= spans["decode"].start_ns < spans["decode"].end_ns
    num_prompt = len(f"{CANARY} " * 20)
    assert run.attributes["gen_ai.usage.input_tokens"] == num_prompt
    assert run.attributes["gen_ai.usage.output_tokens"] == 30
    assert run.attributes["batchway.end"] == "succeeded"
    assert spans["prefill"].attributes["batchway.chunks"] == -(-num_prompt // 64)
    assert spans["prefill"].num_events == spans["prefill"].attributes["batchway.chunks"]
    decode = spans["decode"].attributes
    assert (decode["batchway.steps"], decode["batchway.tokens"]) == (30, 30)
    assert 0 < decode["batchway.step_s.mean"] <= decode["batchway.step_s.max"]
    assert receiver.messages[0].headers["traceparent"].split("-")[1:3] == [
        TRACE_ID,
        spans["callback"].span_id,
    ]
    assert not any(CANARY.encode() in sent or SECRET.encode() in sent for sent in collector.bodies)


async def test_a_resumed_job_has_the_spans_of_both_its_workers(
    collector: Collector,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    functions: Functions,
    keys: Keys,
) -> None:
    """In one trace: how far the drained worker came, and where the next one continued."""
    model = HashModelOptions(eos_rate=0.0, step_s=0.02)
    body = {"model": "m", "prompt": "go on", "max_tokens": 60, "stream": True}
    caller = Caller(functions, redis_client, keys)
    with running_gateway(make_settings(redis_server.url)) as url:
        async with (
            fleet(redis_server.url, 1, model, drain_s=0.1) as [first],
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            await caller.num_workers(1)
            calling = asyncio.create_task(http.post("/v1/completions", json=body))

            async def is_running() -> bool:
                members: Any = await redis_client.zrange(keys.of("leases"), 0, -1)
                if not members:
                    return False
                found = await functions.read(members[0].decode(), "default")
                return found is not None and found[0].num_output_tokens > 5

            await until(is_running)
            assert await first.stop() == 0
            async with fleet(redis_server.url, 1, model):
                (await calling).raise_for_status()
    runs = sorted(collector.named("text_completion m"), key=lambda span: span.start_ns)
    assert [run.attributes["batchway.end"] for run in runs] == ["given back", "succeeded"]
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len(collector.named("queue")) == 1
    by_run = {span.parent_id: span for span in collector.named("decode")}
    early, late = (by_run[run.span_id].attributes["batchway.tokens"] for run in runs)
    resumed_at = [s.attributes["batchway.resumed_at"] for s in collector.named("prefill")]
    assert late == 60 - max(resumed_at)
    assert early >= max(resumed_at) > 5


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = Tracing("batchway-gateway")
    tracing.open()
    assert tracing.tracer is None
    tracing.close()
