"""Calls for vectors as durable jobs: lanes, jobs, quotes, cancels, events, idempotency, stores,
callbacks, traces."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Submission, WorkerCapacity
from contract.functions import Functions, encoded_parts, stored_bytes
from contract.jobs import FinishReason, JobStatus
from contract.keys import Keys
from contract.payloads.directory import DirectoryStore
from contract.payloads.encoding import encode_result
from contract.payloads.store import result_key
from contract.telemetry.tracing import job_attributes
from gateway.redis.broker import Payloads
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.callbacks.test_delivery import service
from tests.gateway.conftest import Gateways, Serving, gateway_client
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.test_embeddings import expected
from tests.gateway.test_jobs import events, field, submit
from tests.gateway.vector_worker import (
    CLASSIFIER,
    EMBEDDER,
    NUM_OUTPUTS,
    PLAIN,
    RERANKER,
    vector_worker,
    vectors,
)

pytestmark = pytest.mark.anyio

NO_TERMS = Submission(0, 1.0, 1.0)
TEXTS = ["a", "bb", "ccc", "dddd"]
EMBED = {"endpoint": "/v1/embeddings", "body": {"model": PLAIN, "input": TEXTS}}
JOBS: list[dict[str, Any]] = [
    EMBED,
    {
        "endpoint": "/v1/rerank",
        "body": {"model": RERANKER, "query": "q", "documents": TEXTS, "top_n": 2},
    },
    {
        "endpoint": "/v1/score",
        "body": {"model": EMBEDDER, "text_1": "q", "text_2": TEXTS},
    },
    {"endpoint": "/v1/classify", "body": {"model": CLASSIFIER, "input": TEXTS}},
]


@pytest.fixture
async def plain(serving: Serving, functions: Functions) -> FakeWorker:
    """A live worker of PLAIN that the test drives."""
    worker = vector_worker(functions, PLAIN)
    worker.capacity = WorkerCapacity(tokens_per_s=1000.0, stream_tokens_per_s=100.0)
    await worker.beat()
    return worker


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["endpoint"])
async def test_a_job_has_the_calls_answer(
    serving: Serving, http: httpx.AsyncClient, job: dict[str, Any]
) -> None:
    """As its result, once it has succeeded; its stream has only the end, which a job object is."""
    await serving(job["body"]["model"])
    direct = (await http.post(job["endpoint"], json=job["body"])).json()
    job_id = await submit(http, job)
    *queued, end, done = await events(http, job_id)
    assert all(field(event, "event") == "queued" for event in queued)
    assert (field(end, "event"), done) == ("succeeded", "data: [DONE]")
    assert await events(http, job_id, **{"last-event-id": "1"}) == [end, done]
    shown = (await http.get(f"/v1/jobs/{job_id}")).json()
    own = ("id", "created")
    assert {k: v for k, v in shown["result"].items() if k not in own} == {
        k: v for k, v in direct.items() if k not in own
    }
    assert (shown["endpoint"], shown["lane"]) == (job["endpoint"], "scoring")
    num_prompt = direct["usage"]["prompt_tokens"]
    assert shown["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 0,
        "total_tokens": num_prompt,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({}, "scoring"),
        ({"service_tier": "default"}, "scoring"),
        ({"service_tier": "priority"}, "interactive"),
        ({"service_tier": "flex"}, "batch"),
    ],
)
async def test_the_tier_chooses_the_lane(
    serving: Serving, http: httpx.AsyncClient, fields: dict[str, str], lane: str
) -> None:
    """`scoring` without one; a job may name any lane."""
    answer = await http.post("/v1/quote", json=EMBED | {"body": EMBED["body"] | fields})  # type: ignore[operator]
    assert answer.json()["lane"] == lane
    answer = await http.post("/v1/quote", json={**EMBED, "lane": "standard"})
    assert answer.json()["lane"] == "standard"


async def test_a_quote_knows_that_there_is_no_output(
    plain: FakeWorker, http: httpx.AsyncClient
) -> None:
    """Also after other jobs have run, from which output lengths are learned."""
    for _ in range(25):
        await submit(http, EMBED)
        await plain.run(await plain.claim())
    quote = (await http.post("/v1/quote", json=EMBED)).json()
    assert (quote["prompt_tokens"], quote["predicted_output_tokens"]) == (18, 0)
    assert quote["is_admitted"]


async def test_a_job_counts_as_one_place_and_its_vectors_as_stored(
    plain: FakeWorker,
    http: httpx.AsyncClient,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """Its prompts leave nothing behind in a worker; its output stays until it is forgotten."""
    job_id = await submit(http, EMBED)
    claimed = await plain.claim()
    assert claimed.cost_tokens == 18
    assert await redis_client.hget(keys.of("job", job_id), "choices") == b"1"
    counted = await redis_client.hget(keys.of("stored", "jobs"), job_id)
    assert counted is not None
    parts = encoded_parts(claimed.job, NO_TERMS)
    without = stored_bytes(claimed.job, NO_TERMS, parts)
    assert int(counted.split()[0]) - without == len(TEXTS) * (4 * NUM_OUTPUTS + 32)


async def test_an_idempotency_key_finds_the_answer(
    serving: Serving, http: httpx.AsyncClient
) -> None:
    """Of a call or a job; another body is refused."""
    worker = await serving(PLAIN)
    headers = {"idempotency-key": "once"}
    answers = [
        await http.post("/v1/embeddings", json=EMBED["body"], headers=headers) for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    assert len(worker.seen) == 1
    other = await http.post("/v1/embeddings", json={"model": PLAIN, "input": "x"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")


async def test_a_call_becomes_a_job_if_its_caller_prefers_that(
    plain: FakeWorker, http: httpx.AsyncClient
) -> None:
    """At once, or after a wait; a result within the wait is the answer."""
    for prefer in ("respond-async", "wait=0"):
        answer = await http.post("/v1/embeddings", json=EMBED["body"], headers={"prefer": prefer})
        assert (answer.status_code, answer.json()["status"]) == (202, "queued")
        await plain.run(await plain.claim())
        job = (await http.get(f"/v1/jobs/{answer.json()['id']}")).json()
        assert job["result"]["data"][0]["embedding"] == expected("a")
    asking = asyncio.create_task(
        http.post("/v1/embeddings", json=EMBED["body"], headers={"prefer": "wait=20"})
    )
    await plain.run(await plain.claim())
    assert (await asking).status_code == 200


async def test_interrupted_jobs_have_no_result(plain: FakeWorker, http: httpx.AsyncClient) -> None:
    """Cancelled or failed, also if some of their vectors are there. A caller's leaving cancels."""
    cancelled, failed = await submit(http, EMBED), await submit(http, EMBED)
    for job_id in (cancelled, failed):
        claimed = await plain.claim()
        assert claimed.job.id == job_id
        await plain.say(claimed, 1, vectors(claimed.job)[0])
        if job_id == failed:
            await plain.finish(claimed, 2, "engine_error", "the numbers are not finite")
    assert (await http.post(f"/v1/jobs/{cancelled}/cancel")).json()["status"] == "cancelled"
    for job_id in (cancelled, failed):
        assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] is None
    asking = asyncio.create_task(http.post("/v1/embeddings", json=EMBED["body"]))
    claimed = await plain.claim()
    asking.cancel()
    assert await plain.wait_until_ended(claimed) is JobStatus.CANCELLED


async def test_long_prompts_and_results_are_in_the_object_store(
    tmp_path: Path, gateways: Gateways, plain: FakeWorker, functions: Functions
) -> None:
    """A result has the same vectors in base64, for readers of its URL."""
    store = DirectoryStore(tmp_path)
    async with gateways(object_store=str(tmp_path), object_min_bytes=64) as http:
        job_id = await submit(http, EMBED | {"body": {"model": PLAIN, "input": ["a" * 40] * 5}})
        claimed = await plain.claim()
        assert claimed.job.stored_prompt is not None
        whole = await Payloads(str(tmp_path), 64).whole(claimed.job)
        said = vectors(whole)
        for number, event in enumerate(said, 1):
            await plain.say(claimed, number, event)
        found = await functions.read(job_id, claimed.job.tenant, max_events=10)
        assert found is not None
        ref = store.put(result_key(job_id, claimed.epoch), encode_result(whole, found[1]))
        fin = Append(job_id, claimed.epoch, len(said) + 1, fin=JobStatus.SUCCEEDED, result=ref)
        await functions.append(plain.incarnation, [fin], lease_s=10.0)
        shown = (await http.get(f"/v1/jobs/{job_id}")).json()
        numbers = [each["embedding"] for each in shown["result"]["data"]]
        assert numbers == [expected("a" * 40)] * 5
        kept = (await http.get(shown["result_url"])).json()
        raw = [base64.b64decode(choice["vector"]) for choice in kept["choices"]]
        assert [list(struct.unpack(f"<{NUM_OUTPUTS}f", each)) for each in raw] == numbers


@pytest.fixture
async def told(
    redis_server: EmbeddedRedis, serving: Serving
) -> AsyncIterator[tuple[httpx.AsyncClient, Receiver, dict[str, str]]]:
    """A client, and a receiver of full callbacks with the callback of its jobs."""
    async with (
        Receiver({"/": always(Answer())}) as receiver,
        service(redis_server),
        gateway_client(redis_server.url, callback_allow=("127.0.0.0/8",)) as http,
    ):
        yield http, receiver, {"url": receiver.url("/"), "secret": SECRET, "payload": "full"}


@pytest.mark.parametrize("number", range(len(JOBS)))
async def test_a_full_callback_has_the_whole_answer(
    serving: Serving, told: tuple[httpx.AsyncClient, Receiver, dict[str, str]], number: int
) -> None:
    """Of each endpoint, as the job has it."""
    http, receiver, callback = told
    await serving(JOBS[number]["body"]["model"])
    job_id = await submit(http, {**JOBS[number], "callback": callback})
    await receiver.until(lambda: len(receiver.messages) == 1)
    shown = (await http.get(f"/v1/jobs/{job_id}")).json()
    data = receiver.messages[0].body["data"]
    assert (data["status"], data["result_url"]) == ("succeeded", f"/v1/jobs/{job_id}")
    assert data["result"] == shown["result"]
    assert "choices" not in data


async def test_a_callback_says_where_many_vectors_are(
    told: tuple[httpx.AsyncClient, Receiver, dict[str, str]], plain: FakeWorker
) -> None:
    """Over the size of a message, and where the job has not all of them."""
    http, receiver, callback = told
    long = ChoiceDelta(0, 0, (), "", FinishReason.STOP, vector=bytes(260_000))
    for number, code in enumerate(("", "engine_error"), 1):
        await submit(http, {**EMBED, "callback": callback})
        claimed = await plain.claim()
        rest = () if code else vectors(claimed.job)[0].deltas[1:]
        await plain.say(claimed, 1, Tokens((long, *rest)))
        await plain.finish(claimed, 2, code, code)
        await receiver.until(lambda: len(receiver.messages) == number)  # noqa: B023
    for message in receiver.messages:
        assert not {"result", "choices"} & set(message.body["data"])


async def test_spans_name_the_operation(serving: Serving, http: httpx.AsyncClient) -> None:
    """By the GenAI conventions, without parameters of sampling."""
    names = []
    for job in JOBS:
        worker = await serving(job["body"]["model"])
        await http.post(job["endpoint"], json=job["body"])
        attributes = job_attributes(worker.seen[0])
        names.append(attributes["gen_ai.operation.name"])
        assert "gen_ai.request.temperature" not in attributes
        assert json.dumps(attributes)
    assert names == ["embeddings", "rerank", "score", "classify"]
