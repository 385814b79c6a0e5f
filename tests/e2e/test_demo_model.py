"""The whole of `batchway up` on the demo model, through the official client."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import redis

from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.infra.stack import Stack, running_demo_stack

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

MODEL = "demo"
JSON = {"content-type": "application/json"}
KEYS = Keys("e2e")


@pytest.fixture(scope="module")
def stack(redis_server: EmbeddedRedis) -> Iterator[Stack]:
    """On a Redis that the tests may look into."""
    arguments = (f"--redis-url={redis_server.url}", f"--namespace={KEYS.namespace}")
    with running_demo_stack(*arguments) as stack:
        yield stack


@pytest.fixture
def redis_view(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def count(first: int, last: int) -> str:
    return ", ".join(map(str, range(first, last + 1)))


def ask(client: openai.OpenAI, question: str, **options: Any) -> str:
    """The answer to one question, greedily."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        **options,
    )
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


def test_it_answers_rightly(client: openai.OpenAI) -> None:
    """The answers mean something, so a test can tell a right one."""
    assert ask(client, "Count from 17 to 23.") == count(17, 23)
    assert ask(client, "Spell the word lantern.") == "l-a-n-t-e-r-n"


def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    """Pieces joined are the whole; one finish reason; the usage at the end, as asked for."""
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 5 to 30."}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == count(5, 30)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 26
    assert sum(len(c.choices[0].delta.content or "") > 0 for c in chunks if c.choices) > 5


def test_raw_completions_take_text_and_token_ids(client: openai.OpenAI) -> None:
    """Both forms of the same prompt have the same answer, and tokens come back where asked."""
    by_text = client.completions.create(
        model=MODEL,
        prompt="1, 2, 3,",
        max_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    token_ids = by_text.choices[0].model_extra["token_ids"]  # type: ignore[index]
    prompt_ids = by_text.model_extra["prompt_token_ids"]  # type: ignore[index]
    by_ids = client.completions.create(model=MODEL, prompt=prompt_ids, max_tokens=12, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert len(token_ids) == 12


def test_the_least_length_outlasts_the_end(client: openai.OpenAI) -> None:
    """`ignore_eos` and `min_tokens` hold the answer open."""
    for options in ({"ignore_eos": True}, {"min_tokens": 40}):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is 2 + 3?"}],
            max_tokens=40,
            temperature=0,
            extra_body=options,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 40


async def test_the_async_client_streams_too(stack: Stack) -> None:
    """The same through asyncio."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 3 to 12."}],
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from 3 to 12."}],
            temperature=0,
        )
    assert "".join(pieces) == whole.choices[0].message.content == count(3, 12)


@dataclass
class Stream:
    """What one raw SSE stream brought."""

    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_done: int = 0
    num_after_done: int = 0


async def read_stream(http: httpx.AsyncClient, question: str) -> Stream:
    stream = Stream()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "stream": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body, timeout=100) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            stream.num_after_done += stream.num_done
            if line == "data: [DONE]":
                stream.num_done += 1
                continue
            [choice] = json.loads(line[6:])["choices"]
            stream.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                stream.finish_reasons.append(choice["finish_reason"])
    return stream


async def test_64_streams_at_once_are_each_as_if_alone(stack: Stack, client: openai.OpenAI) -> None:
    """Exactly one end each, and the very text of its own undisturbed greedy run."""
    questions = [f"Count from {7 * i} to {7 * i + 3 + i % 30}." for i in range(64)]
    async with httpx.AsyncClient(
        base_url=stack.url, limits=httpx.Limits(max_connections=None)
    ) as http:
        streams = await asyncio.gather(*(read_stream(http, q) for q in questions))
        for question, stream in zip(questions, streams, strict=True):
            assert (stream.num_done, stream.num_after_done) == (1, 0)
            assert stream.finish_reasons == ["stop"]
            alone = await asyncio.to_thread(ask, client, question)
            assert stream.text == alone


async def job_object(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
    return job


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process sets no event here
            await asyncio.sleep(0.01)


LONG_COUNT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 200."}],
    "temperature": 0,
}
# The whole count has some 890 tokens.
FAR_FROM_THE_END = 600


def running_jobs(view: redis.Redis) -> set[str]:
    """Ids of the jobs that some worker holds."""
    ids: Any = view.zrange(KEYS.leases, 0, -1)
    return {job_id.decode() for job_id in ids}


def job_record(view: redis.Redis, job_id: str, field: str) -> str:
    value: Any = view.hget(KEYS.job(job_id), field)
    return str(value.decode())


def is_pool_free(view: redis.Redis) -> bool:
    """Whether the worker last said that it holds nothing, and all its blocks are free."""
    incarnations: Any = view.zrange(KEYS.workers(MODEL), 0, -1)
    raw: Any = [view.hget(KEYS.worker(i.decode()), "info") for i in incarnations]
    infos = [json.loads(info) for info in raw]
    return all(i["jobs_held"] == 0 and i["num_free_blocks"] == i["num_blocks"] for i in infos)


async def test_a_cancel_stops_a_count_and_its_events_end_so(
    stack: Stack, redis_view: redis.Redis
) -> None:
    """Cancelled in the middle: the events end in `cancelled`, what was said stays readable, no
    token follows, and the blocks return to the pool."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        submission = {"endpoint": "/v1/chat/completions", "body": LONG_COUNT}
        submitted = await http.post("/v1/jobs", json=submission)
        assert submitted.status_code == 202
        job_id = submitted.json()["id"]
        names: list[str] = []
        num_data = 0
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
            async for line in events.aiter_lines():
                if line.startswith("event: "):
                    names.append(line[7:])
                num_data += line.startswith("data: ")
                if line.startswith("data: ") and num_data == 20:
                    assert (await http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        assert names[-1] == "cancelled"
        job = await job_object(http, job_id)
        assert job["status"] == "cancelled"
        assert 0 < job["usage"]["completion_tokens"] < FAR_FROM_THE_END
        await until(lambda: is_pool_free(redis_view))
        assert await job_object(http, job_id) == job


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_caller_that_goes_away_cancels_its_job(
    stack: Stack, redis_view: redis.Redis, is_stream: bool
) -> None:
    """The count stops long before its end, and the blocks return to the pool."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        body = {**LONG_COUNT, "stream": is_stream}
        request = http.build_request("POST", "/v1/chat/completions", json=body)
        call = asyncio.create_task(http.send(request, stream=is_stream))
        await until(lambda: bool(running_jobs(redis_view)))
        [job_id] = running_jobs(redis_view)
        await until(lambda: int(job_record(redis_view, job_id, "tokens")) > 5)
        if is_stream:
            await (await call).aclose()
        else:
            call.cancel()
        await until(lambda: job_record(redis_view, job_id, "state") == "cancelled")
    num_tokens = int(job_record(redis_view, job_id, "tokens"))
    assert num_tokens < FAR_FROM_THE_END
    await until(lambda: is_pool_free(redis_view))
    assert int(job_record(redis_view, job_id, "tokens")) == num_tokens


async def test_a_cancelled_queued_job_never_runs(stack: Stack, redis_view: redis.Redis) -> None:
    """Submitted while no worker can take it, cancelled, and still without a token later."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        worker_pid = stack.pid_of("infra worker")
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            submission = {"endpoint": "/v1/chat/completions", "body": LONG_COUNT}
            job_id = (await http.post("/v1/jobs", json=submission)).json()["id"]
            assert (await job_object(http, job_id))["status"] == "queued"
            assert (await http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        answer = await http.post("/v1/chat/completions", json={**LONG_COUNT, "max_tokens": 3})
        assert answer.status_code == 200
        job = await job_object(http, job_id)
    assert (job["status"], job["usage"]["completion_tokens"]) == ("cancelled", 0)
    assert job_record(redis_view, job_id, "epoch") == "0"


async def test_bad_requests_cost_only_themselves(stack: Stack) -> None:
    """A stream goes on while others send nonsense; each of them is told what is wrong."""
    nonsense: list[tuple[dict[str, Any], int, str | None]] = [
        ({"model": "nobody"}, 404, "model"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages"),
        ({"wrong": 1}, 400, "wrong"),
    ]
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        stream = asyncio.create_task(read_stream(http, "Count from 100 to 130."))
        for change, status, param in nonsense:
            answer = await http.post("/v1/chat/completions", json=LONG_COUNT | change)
            assert answer.status_code == status
            assert answer.json()["error"]["param"] == param
        broken = await http.post("/v1/chat/completions", content=b'{"model": ', headers=JSON)
        assert broken.status_code == 400
        assert (await stream).text == count(100, 130)
