"""Accuracy of predicted waits: recorded when a job is claimed, reported by lane."""

import asyncio
import json
from typing import Any

import pytest
import redis.asyncio

from contract.connection import connect
from contract.function_types import WorkerCapacity
from contract.functions import Functions
from contract.keys import Keys
from infra import cli
from infra.embedded_redis import EmbeddedRedis
from tests.clock import clock_key
from tests.cluster import plain_client
from tests.contract.some_calls import claim, make_job, make_submission
from tests.gateway.fake_worker import publish_model

pytestmark = pytest.mark.anyio

# One job at a time; each of cost 10 takes a second.
CAPACITY = WorkerCapacity(tokens_per_s=10.0, max_tokens=10, max_jobs=1)


async def beat(functions: Functions) -> None:
    await functions.heartbeat("w1", "m", [], lease_s=10.0, info="{}", capacity=CAPACITY)


async def set_clock(client: redis.asyncio.Redis, keys: Keys, ms: int) -> None:
    await client.set(clock_key(), f"={1_700_000_000_000 + ms}")


@pytest.fixture
async def taken(
    redis_client: redis.asyncio.Redis, keys: Keys, functions: Functions
) -> list[tuple[float | None, float]]:
    """Submits five jobs at once and claims one every two seconds. Returns (predicted, actual) wait
    of each in ms."""
    await set_clock(redis_client, keys, 0)
    await beat(functions)
    jobs = [make_job() for _ in range(5)]
    for job in jobs:
        await functions.submit(job, make_submission(max_output_tokens=7))
    waits: list[tuple[float | None, float]] = []
    for number in range(5):
        await set_clock(redis_client, keys, 2000 * number)
        [claimed] = await claim(functions, max_jobs=1)
        found = await functions.read(claimed.job.id, claimed.job.tenant)
        assert found is not None
        view = found[0]
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


async def test_a_moved_job_reports_no_prediction(
    redis_client: redis.asyncio.Redis, keys: Keys, functions: Functions
) -> None:
    """The prediction was for another lane."""
    await beat(functions)
    job = make_job()
    await functions.submit(job, make_submission())
    await functions.reprioritise(job.id, job.tenant, lane="batch")
    found = await functions.read(job.id, job.tenant)
    assert found is not None
    assert found[0].predicted_wait_ms is None


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
