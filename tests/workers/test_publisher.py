"""What a worker appends: after a cancel little is computed, and it is counted; jobs that end in one
step are ended a few at a time, with other jobs' tokens in between."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.connection import end_tasks
from contract.events import LogEntry
from contract.function_types import Append, LaneRoom, Verdict
from contract.jobs import FinishReason, JobStatus
from contract.payloads.directory import DirectoryStore
from tests.fakes import hash_tokenizer
from tests.fleet import TENANT, Caller, until
from tests.hash_worker import hash_worker_settings
from workers.ipc.messages import StopJob, ToEngine, TokenOut
from workers.supervisor.engine_keeper import EngineKeeper
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.metrics import Meter
from workers.supervisor.publisher import Publisher, ResultKeeper
from workers.supervisor.warming import Warming
from workers.supervisor.worker_broker import WorkerBroker

pytestmark = pytest.mark.anyio

NUM_JOBS = 30


class Engine:
    """Stands in for the engine process: a test sets its output and reads its input."""

    def __init__(self) -> None:
        self.received: list[ToEngine] = []

    def send(self, messages: list[ToEngine]) -> None:
        self.received += messages


async def test_a_cancel_costs_a_step_and_a_publish_at_most(
    caller: Caller, redis_server: Any
) -> None:
    """One token was computed while the caller cancelled, another while its append was refused."""
    settings = hash_worker_settings(redis_server.url)
    lane, engine = WorkerBroker(settings, "w1"), Engine()
    link = EngineLink(settings.engine_options(), client=engine)  # type: ignore[arg-type]
    holding = Holding(link)
    publisher = Publisher(lane, holding, ResultKeeper(None, 0, lane))
    warming = Warming(lane, holding)
    keeper = EngineKeeper(settings, lane, link, holding, publisher, Meter(), warming)
    publishing = asyncio.create_task(publisher.run())
    job = await caller.submit("stop me", max_tokens=100)
    [claimed] = await lane.claim(
        lanes={job.lane: 0.0}, rooms={job.lane: LaneRoom(1, 10**6)}, is_idle=True, config_version=""
    )
    held = HeldJob(claimed, Tokenizer.from_str(hash_tokenizer().tokenizer_json))
    holding.jobs[job.id] = held

    def step(position: int) -> None:
        keeper._receive([TokenOut(job.id, claimed.epoch, 0, position, 97)])

    step(0)
    await caller.has_output(job, 1)
    await caller.functions.cancel(job.id, TENANT)
    holding.job_left.clear()
    step(1)  # computed during the cancel: the append is refused with the reason
    await holding.job_left.wait()
    assert engine.received == [StopJob(job.id, claimed.epoch)]
    step(2)  # computed before the engine received the cancel
    assert holding.tokens_after_cancel == 2
    assert (await caller.view(job)).num_output_tokens == 1
    await end_tasks(publishing)
    await lane.aclose()


async def test_a_cancel_seen_before_an_append_counts_unlogged_tokens(caller: Caller) -> None:
    """Tokens not yet published when the hint arrives. Tokens of a fenced job are not counted."""
    engine = Engine()
    link = EngineLink(hash_worker_settings("").engine, client=engine)  # type: ignore[arg-type]
    holding = Holding(link)
    tokenizer = Tokenizer.from_str(hash_tokenizer().tokenizer_json)
    for prompt in ("a", "b"):
        await caller.submit(prompt)
    claims = await caller.functions.claim(
        "w", "m", ("standard",), lease_s=9, max_jobs=2, max_tokens=999
    )
    cancelled, fenced = (HeldJob(claimed, tokenizer) for claimed in claims)
    for held in (cancelled, fenced):
        holding.jobs[held.job.id] = held
        held.take(TokenOut(held.job.id, held.epoch, 0, 0, 97))

    holding.end(cancelled, "cancelled")
    holding.drop(fenced)
    holding.count_late(cancelled.job.id, cancelled.epoch)
    holding.count_late(fenced.job.id, fenced.epoch)
    assert holding.tokens_after_cancel == 2
    assert [type(message) for message in engine.received] == [StopJob, StopJob]


class CountingLane(WorkerBroker):
    """Counts the ends in each append, and the logs that are read at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_ends: list[int] = []
        self.num_reading = self.most_reading = 0

    async def append(self, items: Sequence[Append]) -> list[tuple[Verdict | JobStatus, int]]:
        self.num_ends.append(sum(item.fin != "" for item in items))
        return await super().append(items)

    async def read_log(self, job_id: str, tenant: str) -> list[LogEntry]:
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        try:
            return await super().read_log(job_id, tenant)
        finally:
            self.num_reading -= 1


@pytest.mark.parametrize("is_kept", [False, True])
async def test_jobs_that_end_together_end_a_few_at_a_time(
    caller: Caller, redis_server: Any, tmp_path: Path, is_kept: bool
) -> None:
    """Also with results in an object store: then few logs are read at once."""
    lane = CountingLane(hash_worker_settings(redis_server.url), "w1")
    holding = Holding(EngineLink(hash_worker_settings("").engine, client=None))
    store = DirectoryStore(tmp_path) if is_kept else None
    publisher = Publisher(lane, holding, ResultKeeper(store, 1, lane))
    jobs = [await caller.submit(f"job {number}", max_tokens=1) for number in range(NUM_JOBS)]
    room = LaneRoom(NUM_JOBS, 10**6)
    claims = await lane.claim(
        lanes={"standard": 0.0}, rooms={"standard": room}, is_idle=True, config_version=""
    )
    tokenizer = Tokenizer.from_str(hash_tokenizer().tokenizer_json)
    for claimed in claims:
        held = HeldJob(claimed, tokenizer)
        holding.jobs[held.job.id] = held
        held.take(TokenOut(held.job.id, held.epoch, 0, 0, 97, FinishReason.LENGTH))
        publisher.note(held)
    publishing = asyncio.create_task(publisher.run())

    async def all_ended() -> bool:
        return not holding.jobs

    await until(all_ended)
    await end_tasks(publishing)
    await lane.aclose()

    assert sum(lane.num_ends) == NUM_JOBS
    assert max(lane.num_ends) <= 8
    assert lane.most_reading == (4 if is_kept else 0)
    views = [await caller.view(job) for job in jobs]
    assert all(view.status is JobStatus.SUCCEEDED for view in views)
    assert [view.result is not None for view in views] == [is_kept] * NUM_JOBS
