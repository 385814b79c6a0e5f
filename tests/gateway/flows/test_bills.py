"""What a flow's tenant is charged: the tokens of the calls that ran."""

from functools import partial

import httpx
import pytest

from contract.jobs import JobStatus
from tests.clock import TEST_CLOCK
from tests.fleet import until
from tests.gateway.conftest import Bearer
from tests.gateway.fake_worker import FakeWorker, says
from tests.gateway.flows.conftest import Fleet, chat, ended, job, submitted
from tests.gateway.flows.model_files import CHAT, COMPLETIONS, ensemble, pipeline, step
from tests.gateway.vector_worker import EMBEDDER, RERANKER

pytestmark = pytest.mark.anyio

_DRAFT = step(
    "draft",
    "small",
    COMPLETIONS,
    prompt="{{ input.input | default(['go']) | first }}",
    max_tokens=40,
)
FLOWS = {
    "long": pipeline(
        _DRAFT,
        step(
            "answer",
            "large",
            CHAT,
            messages="{{ input.messages }}",
            max_tokens="{{ input.max_tokens | default(30) }}",
        ),
    ),
    "embedded": pipeline(
        _DRAFT, step("vector", EMBEDDER, "/v1/embeddings", input="{{ draft.choices[0].text }}")
    ),
    "best": ensemble("best-by-score", "small", "large", scorer=RERANKER),
    "vote": ensemble("vote", "small", "large", "third"),
    "nested": ensemble("vote", "best", "third"),
}


@pytest.fixture
async def fleet(fleet: Fleet) -> Fleet:
    await fleet.start_vectors(EMBEDDER, RERANKER)
    return fleet


async def test_a_caller_s_limit_does_not_cap_the_bill_of_a_pipeline(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    """The template reads another field: the answer has as many tokens as the step allows."""
    fleet.say("large", says("a text of more than ten"))
    answer = await flows.post(CHAT, json={**chat("long"), "max_completion_tokens": 5})
    assert answer.status_code == 200, answer.text
    [first], [last] = fleet.workers["small"].seen, fleet.workers["large"].seen
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == len(b"I am small") + len(b"a text of more than ten")
    assert usage["prompt_tokens"] == first.num_prompt_tokens + last.num_prompt_tokens


async def test_what_a_pipeline_generates_before_it_embeds_is_billed(
    flows: httpx.AsyncClient, fleet: Fleet
) -> None:
    body = {"model": "embedded", "input": "what?", "service_tier": "flex"}
    answer = await flows.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    [first], [last] = fleet.workers["small"].seen, fleet.workers[EMBEDDER].seen
    num_prompt = first.num_prompt_tokens + last.num_prompt_tokens
    assert answer.json()["usage"] == {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + len(b"I am small"),
    }
    job_id = await submitted(flows, {"endpoint": "/v1/embeddings", "body": body})
    found = await ended(flows, job_id)
    assert found["usage"]["completion_tokens"] == len(b"I am small")
    assert found["usage"]["prompt_tokens"] == num_prompt


@pytest.mark.parametrize(
    ("model", "more", "cost"),
    [
        ("long", {}, 2 * 20 + 40 + 30),
        ("long", {"max_tokens": 7}, 2 * 20 + 40 + 7),
        ("long", {"max_completion_tokens": 7}, 2 * 20 + 40 + 30),
        ("best", {"max_tokens": 7}, 2 * (20 + 7) + 2 * (20 + 7)),  # the scorer reads both
        ("nested", {"max_tokens": 7}, 5 * (20 + 7)),
        # What the caller expects lowers nothing.
        ("best", {"max_tokens": 7, "expected_output_tokens": 3}, 2 * (20 + 7) + 2 * (20 + 7)),
    ],
)
async def test_a_flow_reserves_what_its_calls_may_take(
    flows: httpx.AsyncClient, fleet: Fleet, model: str, more: dict[str, int], cost: int
) -> None:
    """Each call reads the prompt, of 20 tokens, and writes as much as its body lets it."""
    asked: dict[str, object] = {"endpoint": CHAT, "body": {**chat(model, "12"), **more}}
    job_id = await submitted(flows, asked)
    assert await fleet.client.hget(fleet.keys.of("job", job_id), "cost") == str(cost).encode()


async def has_seen(worker: FakeWorker) -> bool:
    return bool(worker.seen)


@pytest.mark.parametrize("model", ["vote", "nested"])
async def test_a_cancelled_flow_pays_for_the_calls_that_ran(
    flows: httpx.AsyncClient, fleet: Fleet, bearer: Bearer, model: str
) -> None:
    """`third` has ended, and `large` has begun; its job object shows the same."""
    await fleet.client.set(TEST_CLOCK, "=1700000000000")
    await fleet.stop_serving("large")
    flows.headers.update(await bearer(tokens_per_minute=10_000))
    job_id = await submitted(flows, job(model))
    claimed = await fleet.workers["large"].claim()
    await fleet.workers["large"].say(claimed, 1, says("half")(claimed.job)[0])
    for name in ("small", "third"):
        await until(partial(has_seen, fleet.workers[name]))
        await ended(flows, fleet.workers[name].seen[0].id)
    await flows.post(f"/v1/jobs/{job_id}/cancel")
    assert await fleet.workers["large"].wait_until_ended(claimed) is JobStatus.CANCELLED
    found = await ended(flows, job_id)
    seen = [fleet.workers[name].seen[0] for name in ("small", "large", "third")]
    num_prompt = sum(each.num_prompt_tokens for each in seen)
    num_output = sum(map(len, (b"I am small", b"half", b"I am third")))
    assert found["usage"]["total_tokens"] == num_prompt + num_output
    level = await fleet.client.hmget(fleet.keys.of("tenant", "acme"), "tokens", "reserved")
    assert [float(each or 0) for each in level] == [num_prompt + num_output, 0.0]
