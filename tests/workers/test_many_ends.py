"""Jobs that end in one step are ended a few at a time, with other jobs' tokens in between."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from tokenizers import Tokenizer

from contract.connection import end_tasks
from contract.events import LogEntry
from contract.function_types import Append, LaneRoom, Verdict
from contract.functions import Functions
from contract.jobs import FinishReason, JobStatus
from contract.keys import Keys
from contract.payloads.directory import DirectoryStore
from tests.fakes import hash_tokenizer
from tests.fleet import Caller, until
from tests.hash_worker import hash_worker_settings
from workers.ipc.messages import TokenOut
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.publisher import Publisher, ResultKeeper
from workers.supervisor.worker_broker import WorkerBroker

pytestmark = pytest.mark.anyio

NUM_JOBS = 30


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
    redis_client: redis.asyncio.Redis,
    redis_server: Any,
    functions: Functions,
    keys: Keys,
    tmp_path: Path,
    is_kept: bool,
) -> None:
    """Also with results in an object store: then few logs are read at once."""
    caller = Caller(functions, redis_client, keys)
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
