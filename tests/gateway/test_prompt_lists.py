"""Several prompts in one call: one job, whose choices are numbered over all prompts."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from contract.events import ChoiceDelta, Prompt, Tokens
from contract.jobs import FinishReason, Job
from tests.gateway.conftest import answered, error_of
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from tests.gateway.test_echo import joined, stream
from tests.gateway.test_jobs import events, field

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
PROMPTS = ["ab", "cdé", "f"]  # of 2, 4 and 1 tokens
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS}


def capitals(job: Job) -> list[Prompt | Tokens]:
    """A script: each choice outputs its prompt in capitals. The first choices share an event,
    the last prompt's come first; each other choice has an event of its own."""
    deltas = []
    for index in range(job.num_choices):
        text = bytes(job.prompts[index // job.params.n]).decode().upper()
        ids = tuple(text.encode())
        deltas.append(ChoiceDelta(index, 0, ids, text, FinishReason.STOP))
    firsts = [delta for delta in reversed(deltas) if delta.choice % job.params.n == 0]
    others = [delta for delta in deltas if delta.choice % job.params.n]
    return [Tokens(tuple(firsts)), *(Tokens((delta,)) for delta in others)]


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await answered(http, PATH, BODY, **fields)


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """A response without the fields that differ between two calls."""
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    "prompts", [PROMPTS, [list(text.encode()) for text in PROMPTS]], ids=["texts", "token ids"]
)
async def test_choice_j_of_prompt_i_has_the_index_of_both(
    worker: FakeWorker, http: httpx.AsyncClient, prompts: list[Any]
) -> None:
    """i * n + j, whole and streamed, in one job; the usage sums over the prompts."""
    worker.script = capitals
    answer = await complete(http, prompt=prompts, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["AB", "AB", "CDÉ", "CDÉ", "F", "F"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    counts = {"prompt_tokens": 7, "completion_tokens": 14, "total_tokens": 21}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    fields = {"prompt": prompts, "n": 2, "stream_options": {"include_usage": True}}
    chunks = await stream(http, PATH, BODY | fields)
    assert [joined(chunks, index)["text"] for index in range(6)] == texts
    assert chunks[-1]["usage"] == answer["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(worker.seen) == 2


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_a_list_of_one_prompt_is_that_prompt(
    worker: FakeWorker, http: httpx.AsyncClient, prompt: Any
) -> None:
    """The same job and response, also with all data of the prompt."""
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "return_token_ids": True, "seed": 3}
    alone = await complete(http, prompt=prompt, **fields)
    listed = await complete(http, prompt=[prompt], **fields)
    assert bare(listed) == bare(alone)
    assert listed["prompt_token_ids"] == [97, 98]
    one, other = worker.seen
    assert (one.prompt_ids, one.prompt_list, one.params) == ((97, 98), (), other.params)


async def test_each_choice_has_the_data_of_its_prompt(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Echo, logprobs, prompt_logprobs and token ids equal those of the prompt alone."""
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
    fields |= {"return_token_ids": True, "n": 2}
    listed = await complete(http, **fields)
    alone = [await complete(http, prompt=prompt, **fields) for prompt in PROMPTS]
    expected = [
        choice | {"index": 2 * i + j, "prompt_token_ids": list(PROMPTS[i].encode())}
        for i, answer in enumerate(alone)
        for j, choice in enumerate(answer["choices"])
    ]
    assert listed["choices"] == expected
    assert "prompt_token_ids" not in listed
    chunks = await stream(http, PATH, BODY | fields)
    for index, choice in enumerate(expected):
        assert joined(chunks, index) == {name: choice[name] for name in ("text", "logprobs")}
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [p.get("prompt_token_ids") for p in parts] == [
            choice["prompt_token_ids"],
            *[None] * (len(parts) - 1),
        ]
        assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]


async def test_prompts_can_be_scored_without_output(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """max_tokens 0, as evaluations use it: a score for each token of each prompt, no output."""
    worker.script = says("X")
    answer = await complete(http, max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == PROMPTS
    scores = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert scores == [[None, -1.0], [None, -1.0, -2.0, -3.0], [None]]
    counts = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


async def test_a_given_seed_applies_to_every_prompt(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """So each prompt has the response that it has alone. Without a seed each prompt gets its
    own."""
    await complete(http, seed=5)
    await complete(http)
    given, own = (job.params for job in worker.seen)
    assert [given.of_prompt(i).seed for i in range(3)] == [5, 5, 5]
    assert len({own.of_prompt(i).seed for i in range(3)}) == 3
    assert own.of_prompt(0) == own


async def test_the_default_of_max_tokens_is_computed_for_each_prompt(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """A long prompt does not shorten the output of a short one; the cost counts each maximum."""
    body = BODY | {"prompt": ["a", "b" * 508], "n": 2}
    quote = await answered(http, "/v1/quote", {"endpoint": PATH, "body": body})
    assert (quote["prompt_tokens"], quote["predicted_output_tokens"]) == (509, 2 * (16 + 4))
    worker.script = says("x")
    await complete(http, prompt=["a", "b" * 508], n=2)
    assert worker.seen[0].params.max_tokens == 16


async def test_the_sum_of_all_choices_is_limited(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """128 choices, and as much output as eight choices of one prompt may have."""
    quoted = {"endpoint": PATH, "body": BODY | {"prompt": ["a"] * 64, "n": 2, "max_tokens": 500}}
    quote = await answered(http, "/v1/quote", quoted)
    assert quote["predicted_output_tokens"] == 64_000
    answer = await http.post(PATH, json=BODY | {"prompt": ["a"] * 64, "n": 3})
    assert error_of(answer)[:2] == (400, "n")


async def test_a_job_with_several_prompts_has_one_log_and_one_result(
    worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """The stream continues with the same bytes after each event; an idempotency key finds the
    job."""
    body = BODY | {"n": 2, "echo": True, "logprobs": 1}
    headers = {"idempotency-key": "list"}
    submission = {"endpoint": PATH, "body": body}
    posted = [await http.post("/v1/jobs", json=submission, headers=headers) for _ in range(2)]
    [job_id] = {answer.json()["id"] for answer in posted}
    whole = [e for e in await events(http, job_id) if field(e, "event") != "queued"]
    cuts = [number for number, event in enumerate(whole) if field(event, "id")]
    assert len(cuts) == 4
    for cut in cuts:
        last_id = field(whole[cut], "id") or ""
        assert await events(http, job_id, **{"last-event-id": last_id}) == whole[cut + 1 :]
    chunks = [json.loads(field(event, "data") or "") for event in whole if "cmpl-" in event]
    result = (await http.get(f"/v1/jobs/{job_id}")).json()["result"]
    for index in range(6):
        shown = {name: result["choices"][index][name] for name in ("text", "logprobs")}
        assert joined(chunks, index) == shown
    assert len(worker.seen) == 1


async def test_a_disconnect_cancels_all_prompts(
    idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """One job is cancelled; the output of each prompt stays."""
    asking = asyncio.create_task(http.post(PATH, json=BODY))
    claimed = await idle_worker.claim()
    await idle_worker.say(claimed, 1, says("Hel")(claimed.job)[0])
    asking.cancel()
    assert await idle_worker.wait_until_ended(claimed) == "cancelled"
    result = (await http.get(f"/v1/jobs/{claimed.job.id}")).json()["result"]
    assert [choice["text"] for choice in result["choices"]] == ["Hel"] * 3
