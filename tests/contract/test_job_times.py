"""What is told of the times of a job: predicted and actual waits, latencies by bucket, and what a
worker's engine did with it. On a clock that stands still."""

import asyncio
import json
from typing import Any, Literal

import pytest
import redis.asyncio

from contract.connection import connect
from contract.function_types import Append, JobMark, JobRun, JobView, Release, WorkerCapacity
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.telemetry.metrics import LATENCY_BOUNDS_S
from infra import cli
from infra.embedded_redis import EmbeddedRedis
from tests.clock import clock_key
from tests.cluster import plain_client
from tests.contract.some_calls import append, claim, make_job, make_submission, tokens
from tests.gateway.fake_worker import publish_model

pytestmark = pytest.mark.anyio

Fin = Literal["", JobStatus.SUCCEEDED, JobStatus.FAILED]
NOW_MS = 1_700_000_000_000
# One job at a time; each of cost 10 takes a second.
CAPACITY = WorkerCapacity(tokens_per_s=10.0, max_tokens=10, max_jobs=1)
PREFILL = JobMark("prefill", 900, 100, 3, 1500)
DISPLACED = JobMark("displaced", 50, 50, 1, 700)


async def set_clock(client: redis.asyncio.Redis, ms: int = 0) -> None:
    await client.set(clock_key(), f"={NOW_MS + ms}")


async def beat(functions: Functions) -> None:
    await functions.heartbeat("w1", "m", [], lease_s=10.0, info="{}", capacity=CAPACITY)


async def viewed(functions: Functions, job_id: str) -> JobView:
    found = await functions.read(job_id, "t")
    assert found is not None
    return found[0]


async def started(functions: Functions, **terms: Any) -> str:
    """A job that `w1` has claimed, with epoch 1."""
    job = make_job()
    await functions.submit(job, make_submission(**terms))
    await claim(functions)
    return job.id


@pytest.fixture
async def taken(
    redis_client: redis.asyncio.Redis, functions: Functions
) -> list[tuple[float | None, float]]:
    """Submits five jobs at once and claims one every two seconds. Returns (predicted, actual) wait
    of each in ms."""
    await set_clock(redis_client)
    await beat(functions)
    jobs = [make_job() for _ in range(5)]
    for job in jobs:
        await functions.submit(job, make_submission(max_output_tokens=7))
    waits: list[tuple[float | None, float]] = []
    for number in range(5):
        await set_clock(redis_client, 2000 * number)
        [claimed] = await claim(functions, max_jobs=1)
        view = await viewed(functions, claimed.job.id)
        waits.append((view.predicted_wait_ms, (view.claimed_ms or 0) - view.created_ms))
    return waits


async def test_a_job_reports_its_predicted_and_actual_wait(
    taken: list[tuple[float | None, float]],
) -> None:
    """The prediction was one second for each job ahead; the actual wait was two."""
    assert [actual for _, actual in taken] == [0, 2000, 4000, 6000, 8000]
    assert [predicted for predicted, _ in taken] == [0, 1000, 2000, 3000, 4000]


async def test_the_last_thousand_predictions_are_kept(
    redis_client: redis.asyncio.Redis, keys: Keys, functions: Functions, taken: object
) -> None:
    key = keys.of("calibration", "m", "standard")
    await redis_client.rpush(key, *["100 1000"] * 2000)
    await functions.submit(make_job(), make_submission(max_output_tokens=7))
    assert await claim(functions, max_jobs=1)
    assert await redis_client.llen(key) == 1000


async def test_a_moved_job_reports_no_prediction(functions: Functions) -> None:
    """The prediction was for another lane."""
    await beat(functions)
    job = make_job()
    await functions.submit(job, make_submission())
    await functions.reprioritise(job.id, job.tenant, lane="batch")
    assert (await viewed(functions, job.id)).predicted_wait_ms is None


@pytest.mark.parametrize(
    ("wait_ms", "bucket"),
    [
        (250, LATENCY_BOUNDS_S.index(0.25) + 1),
        (251, LATENCY_BOUNDS_S.index(0.25) + 2),
        (10**9, len(LATENCY_BOUNDS_S) + 1),
    ],
)
async def test_a_latency_is_in_the_first_bucket_that_holds_it(
    functions: Functions, redis_client: redis.asyncio.Redis, wait_ms: int, bucket: int
) -> None:
    """A latency equal to a bucket's bound is in that bucket, as in Prometheus: less or equal."""
    await set_clock(redis_client)
    job = make_job()
    await functions.submit(job, make_submission(deadline_s=10**7))
    await set_clock(redis_client, wait_ms)
    [claimed] = await claim(functions)
    await append(functions, "w1", Append(job.id, claimed.epoch, 1, tokens(0, 97), 1))
    totals = (await functions.snapshot(job.model, [])).totals
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds"):
        assert totals[f"{name}:{job.lane}:{bucket}"] == 1
        assert totals[f"{name}:{job.lane}:sum"] == 1000 * wait_ms


@pytest.mark.parametrize("fin", ["", JobStatus.SUCCEEDED, JobStatus.FAILED])
async def test_marks_come_with_output_and_with_the_end(
    functions: Functions, redis_client: redis.asyncio.Redis, fin: Fin
) -> None:
    """At the times that the worker tells of; a repeated append adds none twice, and an event
    without marks changes none."""
    await set_clock(redis_client)
    job_id = await started(functions)
    first = Append(job_id, 1, 1, tokens(0, 97), 1, marks=(PREFILL, DISPLACED))
    for _ in range(2):
        await append(functions, "w1", first)
    await append(functions, "w1", Append(job_id, 1, 2, tokens(1, 97), 1))
    last = Append(job_id, 1, 3, tokens(2, 97), 1, fin, "a_code", "why", marks=(PREFILL,))
    assert await append(functions, "w1", last) == [("OK", 5 if fin else 4)]
    prefill = JobMark("prefill", NOW_MS - 900, NOW_MS - 100, 3, 1500)
    displaced = JobMark("displaced", NOW_MS - 50, NOW_MS - 50, 1, 700)
    view = await viewed(functions, job_id)
    assert view.runs == (JobRun("w1", NOW_MS, 1, (prefill, displaced, prefill)),)
    assert (view.status, view.num_output_tokens) == (fin or JobStatus.STREAMING, 3)
    if fin:
        assert (view.code, view.message) == ("a_code", "why")


async def test_marks_take_bounded_room(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A job that loses its place a hundred times keeps its claim and the first marks."""
    job_id = await started(functions, max_output_tokens=200)
    for number in range(1, 101):
        item = Append(job_id, 1, number, tokens(number - 1, 97), 1, marks=(DISPLACED,))
        assert await append(functions, "w1", item) == [("OK", number + 1)]
    assert await redis_client.hstrlen(keys.of("job", job_id), "runs") <= 1024
    [run] = (await viewed(functions, job_id)).runs
    assert run.worker == "w1"
    assert 10 < len(run.marks) < 30


async def test_each_claim_is_a_run_from_its_first_event(
    functions: Functions, redis_client: redis.asyncio.Redis
) -> None:
    """A worker that no longer holds the job marks nothing."""
    await set_clock(redis_client)
    job_id = await started(functions)
    await append(functions, "w1", Append(job_id, 1, 1, tokens(0, 97), 1))
    await functions.release("w1", [Release(job_id, 1, "drain")])
    await set_clock(redis_client, 3_000)
    await claim(functions, "w2")
    late = Append(job_id, 1, 2, tokens(1, 97), 1, marks=(PREFILL,))
    assert await append(functions, "w1", late) == [("FENCED", 0)]
    runs = JobRun("w1", NOW_MS, 1, ()), JobRun("w2", NOW_MS + 3_000, 2, ())
    assert (await viewed(functions, job_id)).runs == runs


def test_the_command_line_shows_prediction_errors(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a table and as JSON."""
    with plain_client(redis_server.url, Keys("test")) as client:
        client.flushall()
        client.rpush(Keys("test").of("calibration", "hash", "batch"), "500 1000", "900 1000")

    async def publish() -> None:
        async with connect(redis_server.url, Keys("test")) as own:
            await publish_model(own, Keys("test"))

    asyncio.run(publish())
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    monkeypatch.setenv("BATCHWAY_NAMESPACE", "test")
    assert cli.main(["jobs", "calibration"]) == 0
    shown = capsys.readouterr().out
    assert "batch        2     10 %         50 %" in shown
    assert cli.main(["jobs", "calibration", "--model=hash", "--json=-"]) == 0
    lanes: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["models"]["hash"]
    by_lane = {lane["lane"]: lane for lane in lanes}
    assert by_lane["batch"] == {"lane": "batch", "num_jobs": 2, "p50": 0.1, "p90": 0.5}
    assert by_lane["standard"] == {"lane": "standard", "num_jobs": 0, "p50": None, "p90": None}
