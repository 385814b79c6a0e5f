"""Long prompts and results through a real gateway and a real worker, over either store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from msgspec import structs

from contract.function_types import Append, Release
from contract.functions import Functions
from contract.jobs import Job, ObjectRef
from contract.keys import Keys
from contract.payloads import open_store
from contract.payloads.directory import DirectoryStore
from contract.payloads.store import PayloadLost, image_key
from infra.embedded_redis import EmbeddedRedis
from tests.clock import TEST_CLOCK, library_with_test_clock
from tests.contract.some_calls import append, claim, make_job, make_submission, tokens
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet, until
from tests.gateway.conftest import make_settings, running_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

MIN_BYTES = 512
NUM_TOKENS = 60
PROMPT = "a long prompt " * 60
MODEL = HashModelOptions(eos_rate=0.0, max_model_len=2048, num_blocks=160)
SLOW_MODEL = structs.replace(MODEL, step_s=0.03)


def settings_of(store: str | Path, **fields: Any) -> dict[str, Any]:
    return {"object_store": str(store), "object_min_bytes": MIN_BYTES, **fields}


@pytest.fixture
def caller(functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys) -> Caller:
    return Caller(functions, redis_client, keys)


@asynccontextmanager
async def gateway(redis_server: EmbeddedRedis, **fields: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with these settings."""
    with running_gateway(make_settings(redis_server.url, **fields)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield http


async def submit(http: httpx.AsyncClient, prompt: str | list[str] = PROMPT, **fields: Any) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "seed": 7, **fields}
    answer = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def ended(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """Waits for the job's end; returns the job."""

    async def has_ended() -> bool:
        answer = await http.get(f"/v1/jobs/{job_id}")
        return answer.status_code != 200 or answer.json()["timings"]["finished_at"] is not None

    await until(has_ended)
    answer = await http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    return job


def jobs_in(directory: Path) -> list[str]:
    """Ids of the jobs with objects."""
    return [path.name for path in directory.glob("job-*")]


async def stream(http: httpx.AsyncClient, job_id: str, after: str = "0") -> list[str]:
    answer = await http.get(f"/v1/jobs/{job_id}/events", params={"starting_after": after})
    assert answer.status_code == 200, answer.text
    spoken = "\n".join(line for line in answer.text.split("\n") if not line.startswith(":"))
    parts = [part.strip("\n") for part in spoken.split("\n\n")]
    return [part for part in parts if part and not part.startswith("event: queued")]


@pytest.mark.parametrize(
    ("kind", "prompt"), [("directory", [PROMPT, "another " * 60]), ("s3", PROMPT)]
)
async def test_long_prompts_and_results_are_in_the_object_store(
    kind: str,
    prompt: str | list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    caller: Caller,
    keys: Keys,
) -> None:
    """Results and streams equal those of a job stored in Redis. The result's URL needs no key."""
    setting = request.getfixturevalue("s3_setting") if kind == "s3" else tmp_path / "objects"
    fields = settings_of(setting)
    async with fleet(redis_server.url, 1, MODEL, **fields):
        await caller.num_workers(1)
        async with gateway(redis_server, **fields) as http, gateway(redis_server) as plain:
            echo: dict[str, Any] = {"echo": True, "logprobs": 1, "return_token_ids": True}
            job_id = await submit(http, prompt, **echo)
            in_redis = await submit(plain, prompt, **echo)
            job, other = await ended(http, job_id), await ended(http, in_redis)
            # The second job's result is in the store too, and its prompt in Redis.
            assert job["result"]["choices"] == other["result"]["choices"]
            shown = [choice["text"] for choice in job["result"]["choices"]]
            asked = [prompt] if isinstance(prompt, str) else prompt
            assert all(map(str.startswith, shown, asked))
            assert len(shown) == len(asked)
            assert await redis_client.hstrlen(keys.of("job", job_id), "job") < 600
            assert await redis_client.hstrlen(keys.of("job", in_redis), "job") > 1000
            assert await redis_client.xlen(keys.of("log", job_id)) == 1

            whole = await stream(http, job_id)
            numbered = [p for p in whole if "id: " in p]
            middle = numbered[len(numbered) // 2]
            after = middle.split("id: ")[1].split("\n")[0]
            assert await stream(http, job_id, after) == whole[whole.index(middle) + 1 :]

            kept = (await http.get(job["result_url"])).json()
            for choice, other in zip(kept["choices"], job["result"]["choices"], strict=True):
                assert choice["token_ids"] == other["token_ids"]

            assert (await http.delete(f"/v1/jobs/{job_id}")).status_code == 200
            assert (await http.get(job["result_url"])).status_code in (404, 500)
            assert await redis_client.scard(keys.of("orphaned")) == 0


async def test_a_lost_object_fails_its_job_alone(
    tmp_path: Path, redis_server: EmbeddedRedis, caller: Caller
) -> None:
    """A damaged prompt fails its job with a reason, a missing result the request for it."""
    fields = settings_of(tmp_path)
    async with (
        gateway(redis_server, **fields) as http,
        fleet(redis_server.url, 1, MODEL, **fields) as [worker],
    ):
        await caller.num_workers(1)
        lost = await submit(http)
        await ended(http, lost)
        next((tmp_path / lost).glob("result-*")).unlink()
        # By a gateway that has not cached it; the stream has begun before the error.
        async with gateway(redis_server, **fields) as second:
            answer = await second.get(f"/v1/jobs/{lost}")
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "payload_lost"
            answer = await second.get(f"/v1/jobs/{lost}/events")
            assert '"code":"payload_lost"' in answer.text.split("\n\n")[-3]
        await worker.stop()
        damaged, whole = await submit(http), await submit(http)
        (tmp_path / damaged / "prompt").write_bytes(b"another")
        async with fleet(redis_server.url, 1, MODEL, **fields):
            failed, done = await asyncio.gather(ended(http, damaged), ended(http, whole))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "payload_lost")
    assert done["status"] == "succeeded"


async def test_a_job_fails_on_a_worker_with_another_object_store(
    tmp_path: Path, redis_server: EmbeddedRedis, caller: Caller
) -> None:
    """If its prompt is in the store. The worker continues."""
    async with fleet(redis_server.url, 1, MODEL, **settings_of(tmp_path / "two")):
        await caller.num_workers(1)
        async with gateway(redis_server, **settings_of(tmp_path / "one")) as http:
            failed = await ended(http, await submit(http))
            short = await ended(http, await submit(http, prompt="short", max_tokens=2))
    assert failed["error"]["code"] == "payload_lost"
    assert short["status"] == "succeeded"


async def test_a_result_of_a_killed_worker_is_written_again_by_the_next(
    tmp_path: Path, redis_server: EmbeddedRedis, caller: Caller
) -> None:
    """The next worker has a higher epoch; the record names its object."""
    fields = settings_of(tmp_path)
    async with gateway(redis_server, **fields) as http:
        async with fleet(redis_server.url, 1, SLOW_MODEL, **fields) as [first]:
            await caller.num_workers(1)
            job_id = await submit(http)

            async def has_output() -> bool:
                found = await caller.functions.read(job_id, "default")
                return found is not None and found[0].num_output_tokens > 0

            await until(has_output)
            first.kill()
        async with fleet(redis_server.url, 1, MODEL, **fields):
            job = await ended(http, job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 2)
    assert (await result_of(caller, job_id)).key == f"{job_id}/result-2"


async def result_of(caller: Caller, job_id: str) -> ObjectRef:
    found = await caller.functions.read(job_id, "default")
    assert found is not None
    assert found[0].result is not None
    return found[0].result


async def test_objects_are_deleted_with_their_job(
    tmp_path: Path,
    redis_server: EmbeddedRedis,
    redis_client: redis.asyncio.Redis,
    caller: Caller,
) -> None:
    """After its retention the sweep lists it, and a worker deletes its objects."""
    fields = settings_of(tmp_path)
    async with (
        gateway(redis_server, job_retention_s=60.0, **fields) as http,
        fleet(redis_server.url, 1, MODEL, **fields),
    ):
        await caller.num_workers(1)
        job_id = await submit(http)
        await ended(http, job_id)
        result = await result_of(caller, job_id)
        await redis_client.function_load(library_with_test_clock(), replace=True)
        await redis_client.incrby(TEST_CLOCK, 61_000)

        async def is_gone() -> bool:
            return jobs_in(tmp_path) == []

        await until(is_gone)
        store = open_store(str(tmp_path))
        assert isinstance(store, DirectoryStore)
        with pytest.raises(PayloadLost):
            store.get(result)


async def test_a_rejected_job_leaves_no_object(
    tmp_path: Path, redis_server: EmbeddedRedis, caller: Caller
) -> None:
    """The prompt is written before the submission, and deleted if that is rejected."""
    async with fleet(redis_server.url, 1, MODEL):
        await caller.num_workers(1)
    async with gateway(redis_server, **settings_of(tmp_path, lane_bound_tokens=1500)) as http:
        taken = await submit(http)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
        refused = await http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
        assert refused.status_code == 429
    assert jobs_in(tmp_path) == [taken]


async def test_an_image_that_is_gone_at_a_resume_fails_its_job_alone(
    tmp_path: Path, redis_server: EmbeddedRedis, functions: Functions, caller: Caller
) -> None:
    """With the reason. The other job gets as far as the engine, which takes no images."""
    store = open_store(str(tmp_path))
    assert store is not None
    jobs = []
    for _ in range(2):
        job = make_job(num_prompt=30)
        ref = store.put(image_key(job.id, 0), b"an image")
        job = structs.replace(job, images=(ref,), num_image_tokens=64)
        assert job.num_prompt_tokens == 94
        await functions.submit(job, make_submission())
        jobs.append(job)
    for claimed in await claim(functions, "gone"):
        assert claimed.job.images
        first = Append(claimed.job.id, claimed.epoch, 1, tokens(0, 97), 1)
        await append(functions, "gone", first)
        await functions.release("gone", [Release(claimed.job.id, claimed.epoch, "drain")])
    lost, _ = jobs
    store.delete_job(lost.id)
    async with fleet(redis_server.url, 1, MODEL, **settings_of(tmp_path)):
        for job in jobs:
            await until(partial(has_ended, functions, job))
    failed = [await functions.read(job.id, "t") for job in jobs]
    ends = [(view.code, view.message) for view, _ in filter(None, failed)]
    assert ends == [
        ("payload_lost", "its prompt or an image is lost"),
        ("bad_parameter", "this engine takes no images"),
    ]


async def has_ended(functions: Functions, job: Job) -> bool:
    found = await functions.read(job.id, job.tenant)
    assert found is not None
    return found[0].is_terminal
