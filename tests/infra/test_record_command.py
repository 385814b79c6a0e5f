"""`batchway record`: what it writes of a fleet's jobs."""

import asyncio
import re
import signal
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Release, Submission, Verdict
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys
from contract.library import ensure_library
from contract.partitions import made_number
from infra import record_command
from infra.cli import main
from infra.embedded_redis import EmbeddedRedis
from infra.planning.traces import RecordedFleet, read_recording


@pytest.mark.anyio
async def test_a_recording_has_lengths_and_times_and_no_text(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    functions = Functions(redis_client, Keys())
    for number in range(3):
        await functions.submit(*some_job(f"job-0-{number}", (4711,) * (5 + number)))
    claimed = await functions.claim("w", "m", ["batch"], lease_s=10.0, max_jobs=2, max_tokens=10**6)
    event = Tokens((ChoiceDelta(0, 0, (1234, 1235), "secret"),))
    end = Append("job-0-0", claimed[0].epoch, 1, event, 2, JobStatus.SUCCEEDED)
    await functions.append("w", [end], lease_s=10.0)
    out = tmp_path / "recording.jsonl"
    arguments = ["record", f"--out={out}", "--seconds=0.1", f"--redis-url={redis_server.url}"]
    assert await asyncio.to_thread(main, arguments) == 0
    fleet, jobs = read_recording(out)
    assert fleet == RecordedFleet(models=("m",))
    assert [(job.prompt_tokens, job.state) for job in jobs] == [
        (5, "succeeded"),
        (6, "running"),
        (7, "queued"),
    ]
    first = jobs[0]
    assert (first.output_tokens, first.tenant, first.lane) == (2, "acme", "batch")
    assert first.claimed_s is not None
    assert 0.0 <= first.arrival_s <= first.claimed_s <= (first.first_token_s or 0.0)
    assert not re.search("4711|1234|secret", out.read_text())
    assert out.stat().st_mode & 0o077 == 0


@pytest.mark.anyio
async def test_a_recording_counts_what_later_workers_computed_again(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """Each claim after the first computes the prompt and the logged tokens again, however
    soon it ends. A claim before the first token computes nothing again."""
    functions = Functions(redis_client, Keys())
    job, submission = some_job("job-0-0")
    await functions.submit(job, submission)
    number = 1
    for worker, num_new in (("w", 0), ("x", 3), ("y", 2), ("z", 1)):
        [claimed] = await functions.claim(
            worker, job.model, [job.lane], lease_s=10.0, max_jobs=1, max_tokens=10**6
        )
        for _ in range(num_new):
            event = Tokens((ChoiceDelta(0, number - 1, (1,), "a"),))
            item = Append(job.id, claimed.epoch, number, event, 1)
            if number == 6:
                item = msgspec.structs.replace(item, fin=JobStatus.SUCCEEDED)
            assert (await functions.append(worker, [item], lease_s=10.0))[0][0] == Verdict.OK
            number += 1
        if worker != "z":
            await functions.release(worker, [Release(job.id, claimed.epoch, "drain")])
    out = tmp_path / "recording.jsonl"
    await asyncio.to_thread(record_command.record, redis_server.url, "default", out, 0.1)
    [recorded] = read_recording(out)[1]
    num_prompt = len(job.prompt_ids)
    assert (recorded.attempts, recorded.worker, recorded.output_tokens) == (4, "worker-4", 6)
    assert recorded.recomputed_tokens == (num_prompt + 3) + (num_prompt + 5)


@pytest.mark.anyio
async def test_a_recording_has_the_jobs_of_all_partitions(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    await made_number(redis_client, Keys("default"), 3)
    for number in range(3):
        functions = Functions(redis_client, Keys("default", number))
        await functions.submit(*some_job(f"job-{number}-0"))
    out = tmp_path / "recording.jsonl"
    await asyncio.to_thread(record_command.record, redis_server.url, "default", out, 0.1)
    assert len(read_recording(out)[1]) == 3


def test_a_recording_outlives_its_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was seen before Redis died is in the file, and what came after it."""
    with EmbeddedRedis(tmp_path / "data", fsync="always") as server:

        async def submit(job_id: str) -> None:
            async with connect(server.url, Keys("test")) as client:
                await ensure_library(client)
                await Functions(client, Keys()).submit(*some_job(job_id))

        looks = iter(("job-0-1", "dead", "job-0-2"))

        async def before_look(_: float) -> bool:
            step = next(looks)
            if step == "dead":
                server.kill()
                return False
            if not server.is_running:
                server.start()
            await submit(step)
            return step == "job-0-2"

        monkeypatch.setattr(record_command, "_waited", before_look)
        assert record_command.record(server.url, "default", tmp_path / "out.jsonl", None) == 2
    assert "not read: Redis does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_recording_with_a_last_look(
    number: signal.Signals,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = record_command._waited

    async def signalled(_: float) -> bool:
        async with connect(redis_server.url, Keys("test")) as client:
            await client.flushall()
            await ensure_library(client)
            await Functions(client, Keys()).submit(*some_job("job-0-0"))
        signal.raise_signal(number)
        return await waited(60.0)

    monkeypatch.setattr(record_command, "_waited", signalled)
    before = signal.signal(number, signal.default_int_handler)  # shells ignore it for some
    try:
        assert record_command.record(redis_server.url, "default", tmp_path / "out", None) == 1
    finally:
        signal.signal(number, before)


def some_job(job_id: str, prompt_ids: tuple[int, ...] = (1, 2)) -> tuple[Job, Submission]:
    job = Job(
        id=job_id, tenant="acme", model="m", lane="batch", endpoint=Endpoint.COMPLETIONS,
        prompt_ids=prompt_ids, params=SamplingParams(max_tokens=9, seed=1), created_s=1,
    )  # fmt: skip
    return job, Submission(9, deadline_s=600.0, retention_s=60.0)
