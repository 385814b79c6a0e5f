"""What was found of prompts in a prefix cache is told wherever a usage is, and has a price."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from contract.events import ChoiceDelta, Tokens
from contract.jobs import FinishReason, Job
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK
from tests.gateway.conftest import Bearer, gateway_client
from tests.gateway.fake_worker import MODEL, FakeWorker, finds, says
from tests.gateway.test_messages import accumulated, events_in
from tests.streams import whole_stream

pytestmark = pytest.mark.anyio

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "a prompt"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 30},
}


def each_prompt_finds(*num_cached: int) -> Any:
    """Each prompt begins in an event of its own, with what was cached of it."""

    def script(job: Job) -> Sequence[Tokens]:
        events, n = [], job.params.n
        for prompt in range(job.num_prompts):
            choices = range(prompt * n, prompt * n + n)
            end = FinishReason.STOP
            deltas = tuple(ChoiceDelta(choice, 0, (97,), "a", end) for choice in choices)
            events.append(Tokens(deltas, num_cached[prompt]))
        return events

    return script


def cached_in(usage: dict[str, Any]) -> int:
    """By the names of each interface; of Anthropic's, which excludes them from the input."""
    if "cache_read_input_tokens" in usage:
        assert usage["cache_creation_input_tokens"] == 0
        return int(usage["cache_read_input_tokens"])
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.parametrize("num_cached", [0, 1, 5])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_each_interface_tells_it_whole_and_streamed(
    worker: FakeWorker, http: httpx.AsyncClient, path: str, num_cached: int
) -> None:
    """And so does the job. What is counted beside stays the same."""
    body = ENDPOINTS[path] | {"model": MODEL}
    plain = (await http.post(path, json=body)).json()["usage"]
    worker.script = finds(num_cached, says("Hello", " wörld", "!"))
    answer = await http.post(path, json=body)
    usage = answer.json()["usage"]
    assert cached_in(usage) == num_cached
    if path == "/v1/messages":
        assert usage["input_tokens"] == plain["input_tokens"] - num_cached > 0
        streamed = await http.post(path, json=body | {"stream": True})
        first = events_in(streamed)[0]["message"]["usage"]
        assert accumulated(events_in(streamed))["usage"] == usage
        assert {**first, "output_tokens": usage["output_tokens"]} == usage
    else:
        options = {"stream_options": {"include_usage": True}} if "responses" not in path else {}
        streamed = await http.post(path, json=body | {"stream": True, **options})
        *_, last = [e.data for e in whole_stream(streamed.text)]
        assert last.get("response", last)["usage"] == usage
    names = [name for name in plain if isinstance(plain[name], int) and "input" not in name]
    assert [usage[name] for name in names] == [plain[name] for name in names]
    job_id = answer.headers["x-job-id"]
    assert cached_in((await http.get(f"/v1/jobs/{job_id}")).json()["usage"]) == num_cached


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("found", [(2,), (0, 3), (1, 0, 4)])
async def test_prompts_are_summed_and_their_choices_are_not(
    worker: FakeWorker, http: httpx.AsyncClient, found: tuple[int, ...], n: int
) -> None:
    """Whole, at the end of a stream, and so far in each of its chunks; in the list of jobs, and in
    the fleet's metrics."""
    worker.script = each_prompt_finds(*found)
    body = {"model": MODEL, "prompt": ["a prompt"] * len(found), "n": n}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert cached_in(usage) == sum(found)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streaming = body | {"stream": True, "stream_options": options}
    answer = await http.post("/v1/completions", json=streaming)
    so_far = [cached_in(event.data["usage"]) for event in whole_stream(answer.text)]
    assert so_far == [*(sum(found[: i + 1]) for i in range(len(found))), sum(found)]
    jobs = (await http.get("/v1/jobs")).json()["data"]
    assert [cached_in(job["usage"]) for job in jobs] == [sum(found)] * 2
    metrics = (await http.get("/metrics")).text
    labels = f'{{lane="standard",model_name="{MODEL}"}}'
    assert f"batchway_prompt_tokens_cached_total{labels} {2 * sum(found)}.0\n" in metrics


async def test_a_stored_chat_tells_it(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    worker.script = finds(4, says("Hello"))
    body = {"model": MODEL, "messages": HI, "store": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    stored = (await http.get(f"/v1/chat/completions/{answer['id']}")).json()
    assert stored["usage"] == answer["usage"]
    assert cached_in(stored["usage"]) == 4


@pytest.mark.parametrize("cached_price", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("tier", "price"), [("flex", 0.5), ("default", 1.0)])
async def test_a_cached_token_counts_less_in_a_key_s_limit(
    redis_server: EmbeddedRedis,
    worker: FakeWorker,
    bearer: Bearer,
    tier: str,
    price: float,
    cached_price: float,
) -> None:
    """BATCHWAY_CACHED_PRICE, beside the price of the lane; the usage stays the true number."""
    await worker.client.set(TEST_CLOCK, "=1700000000000")
    worker.script = finds(20, says("Hello"))
    headers = await bearer(tokens_per_minute=1000)
    prices = {"batch_price": 0.5, "cached_price": cached_price}
    body = {"model": MODEL, "prompt": "x" * 30, "max_tokens": 30, "service_tier": tier}
    async with gateway_client(redis_server.url, headers, **prices) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == 35
    level = await worker.client.hget(worker.keys.of("tenant", "acme"), "tokens")
    assert float(level or 0) == (15 + 20 * cached_price) * price
