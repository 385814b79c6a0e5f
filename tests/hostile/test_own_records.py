"""Damaged records: their own requests get a clear error, and lists show the others."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from contract.api_keys import KeyTerms
from contract.batches import Batches, NewBatch, new_batch_id
from contract.files import Files, StoredFile, new_file_id
from contract.jobs import Endpoint
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import idle_worker, make_settings, running_gateway
from tests.gateway.fake_worker import MODEL, FakeWorker
from tests.hostile.mutations import Mutator
from tests.marks import LONG

pytestmark = pytest.mark.anyio

__all__ = ["idle_worker"]

COMPLETION = {"model": MODEL, "prompt": "ab", "logprobs": 2, "n": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]}
RESPONSE = {"model": MODEL, "input": "ab"}
JOBS: list[dict[str, Any]] = [
    {"endpoint": "/v1/completions", "body": COMPLETION, "metadata": {"a": "b"}},
    {"endpoint": "/v1/chat/completions", "body": CHAT, "metadata": {"a": "b"}},
    {"endpoint": "/v1/responses", "body": RESPONSE, "metadata": {"a": "b"}},
]
LISTS = ("/v1/jobs", "/v1/jobs?status=succeeded", "/v1/jobs?lane=standard&metadata[a]=b")


@pytest.fixture
async def http(
    redis_server: EmbeddedRedis, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    settings = make_settings(redis_server.url, object_store=str(tmp_path / "objects"))
    with running_gateway(settings) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield client


def is_clear(answer: httpx.Response) -> bool:
    """Not an internal error, nor an event of one."""
    return "internal_error" not in answer.text and answer.status_code in (200, 404, 409, 410)


class Case:
    """A job of some kind, ended or not, and its damaged keys."""

    def __init__(self, http: httpx.AsyncClient, worker: FakeWorker, keys: Keys, seed: int) -> None:
        self._http = http
        self._worker = worker
        self._keys = keys
        self._rng = random.Random(seed)
        self.job_id = ""
        self.has_ended = False

    async def begin(self) -> None:
        made = await self._http.post("/v1/jobs", json=self._rng.choice(JOBS))
        self.job_id = made.json()["id"]
        claimed = await self._worker.claim()
        self.has_ended = self._rng.random() < 0.7
        if self.has_ended:
            await self._worker.run(claimed)

    def damage(self, mutator: Mutator) -> None:
        record, log = (self._keys.of("job", self.job_id), self._keys.of("log", self.job_id))
        for _ in range(self._rng.choice([1, 1, 2, 3])):
            key = record if self._rng.random() < 0.6 else log
            with contextlib.suppress(redis.ResponseError):
                mutator.damage(key.encode())

    async def requests(self) -> AsyncIterator[tuple[str, httpx.Response]]:
        """Everything that a caller may do with its job."""
        path = f"/v1/jobs/{self.job_id}"
        response = f"/v1/responses/{self.job_id.replace('job-', 'resp_')}"
        asked = [
            ("GET", path, None),
            ("GET", f"{response}/input_items", None),
            ("GET", response, None),
            ("PATCH", path, {"deadline_s": 60}),
            ("POST", f"{path}/cancel", None),
            ("GET", f"{response}?stream=true", None),
            ("GET", f"{path}/events", None),
            ("DELETE", path, None),
        ]
        for method, where, body in asked:
            with contextlib.suppress(httpx.ReadTimeout):  # a stream may wait for what is lost
                answer = await self._http.request(method, where, json=body, timeout=0.5)
                yield f"{method} {where}", answer


@pytest.mark.campaign
@pytest.mark.parametrize("first_seed", [0, 30, *(pytest.param(s, marks=LONG) for s in (60, 90))])
async def test_a_damaged_job_gets_a_clear_error_and_breaks_no_list(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    idle_worker: FakeWorker,
    http: httpx.AsyncClient,
    first_seed: int,
) -> None:
    """Whatever is wrong in its record or its log: each request for it says so, none is an internal
    error, and the other jobs are listed."""
    sound = Case(http, idle_worker, keys, 0)
    await sound.begin()
    with redis.Redis.from_url(redis_server.url) as client:
        for seed in range(first_seed, first_seed + 30):
            case = Case(http, idle_worker, keys, seed)
            await case.begin()
            await asyncio.to_thread(case.damage, Mutator(client, client, keys.tag, seed))
            for path in LISTS:
                listed = await http.get(path)
                assert listed.status_code == 200, (seed, path, listed.text)
            everything = (await http.get("/v1/jobs")).json()["data"]
            assert sound.job_id in [job["id"] for job in everything], seed
            async for what, answer in case.requests():
                assert is_clear(answer), (seed, what, answer.status_code, answer.text[:300])
            await redis_client.delete(keys.of("job", case.job_id), keys.of("log", case.job_id))
            await redis_client.zrem(keys.of("jobs", "default"), case.job_id)


async def test_a_job_whose_record_cannot_be_decoded_says_so_and_can_be_deleted(
    redis_client: redis.asyncio.Redis, keys: Keys, idle_worker: FakeWorker, http: httpx.AsyncClient
) -> None:
    """410, which no client repeats."""
    made = (await http.post("/v1/jobs", json=JOBS[0])).json()
    path = f"/v1/jobs/{made['id']}"
    await idle_worker.run(await idle_worker.claim())
    await redis_client.hset(keys.of("job", made["id"]), "job", b"\xff")
    for answer in (await http.get(path), await http.get(f"{path}/events")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "record_unreadable")
        assert answer.headers["x-should-retry"] == "false"
    assert (await http.delete(path)).status_code == 200
    assert (await http.get(path)).status_code == 404


async def new_file(redis_client: redis.asyncio.Redis, keys: Keys) -> tuple[str, str]:
    """The path and the key of a new file's record."""
    files, file_id = Files(redis_client, keys), new_file_id()
    file = StoredFile(id=file_id, tenant="default", num_bytes=1, purpose="batch", filename="a")
    await files.add(file, lifetime_s=3600, max_tenant_bytes=0)
    return f"/v1/files/{file_id}", keys.of("file", file_id)


async def new_batch(redis_client: redis.asyncio.Redis, keys: Keys) -> tuple[str, str]:
    """The same of a new batch."""
    asked = NewBatch(
        endpoint=Endpoint.COMPLETIONS,
        input_file_id="file-" + "0" * 32,
        completion_window="24h",
        terms=KeyTerms(tenant="default"),
        output_lifetime_s=3600.0,
    )
    batch_id = new_batch_id()
    await Batches(redis_client, keys).add(batch_id, asked, window_s=3600, max_open=0)
    return f"/v1/batches/{batch_id}", keys.of("batch", batch_id)


@pytest.mark.parametrize(
    ("make", "listed_at"), [(new_file, "/v1/files"), (new_batch, "/v1/batches")]
)
async def test_a_damaged_file_or_batch_gets_a_clear_error_and_breaks_no_list(
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    http: httpx.AsyncClient,
    make: Callable[[redis.asyncio.Redis, Keys], Awaitable[tuple[str, str]]],
    listed_at: str,
) -> None:
    """As a damaged job."""
    with redis.Redis.from_url(redis_server.url) as client:
        for seed in range(60):
            mutator = Mutator(client, client, keys.tag, seed)
            (path, key), (sound, _) = await make(redis_client, keys), await make(redis_client, keys)
            with contextlib.suppress(redis.ResponseError):
                await asyncio.to_thread(mutator.damage, key.encode())
            listed = await http.get(listed_at, params={"limit": 100})
            assert listed.status_code == 200, (seed, listed.text)
            assert sound.rpartition("/")[2] in [each["id"] for each in listed.json()["data"]], seed
            answer = await http.get(path)
            assert is_clear(answer), (seed, answer.text)
            await redis_client.delete(key)
