"""Tokens computed after a cancel: at most those of one step and one publish, and they are
counted."""

import asyncio
from typing import Any

import pytest
import redis.asyncio
from tokenizers import Tokenizer

from contract.connection import end_tasks
from contract.function_types import LaneRoom
from contract.functions import Functions
from contract.keys import Keys
from tests.fakes import hash_tokenizer
from tests.fleet import TENANT, Caller
from tests.hash_worker import hash_worker_settings
from workers.ipc.messages import StopJob, ToEngine, TokenOut
from workers.supervisor.engine_keeper import EngineKeeper
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.metrics import Meter
from workers.supervisor.publisher import Publisher, ResultKeeper
from workers.supervisor.worker_broker import WorkerBroker

pytestmark = pytest.mark.anyio


class Engine:
    """Stands in for the engine process: a test sets its output and reads its input."""

    def __init__(self) -> None:
        self.received: list[ToEngine] = []

    def send(self, messages: list[ToEngine]) -> None:
        self.received += messages


async def test_a_cancel_costs_a_step_and_a_publish_at_most(
    redis_client: redis.asyncio.Redis, redis_server: Any, functions: Functions, keys: Keys
) -> None:
    """One token was computed while the caller cancelled, another while its append was refused."""
    caller = Caller(functions, redis_client, keys)
    settings = hash_worker_settings(redis_server.url)
    lane, engine = WorkerBroker(settings, "w1"), Engine()
    link = EngineLink(settings.engine_options(), client=engine)  # type: ignore[arg-type]
    holding = Holding(link)
    publisher = Publisher(lane, holding, ResultKeeper(None, 0, lane))
    keeper = EngineKeeper(settings, lane, link, holding, publisher, Meter())
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
    await functions.cancel(job.id, TENANT)
    holding.job_left.clear()
    step(1)  # computed during the cancel: the append is refused with the reason
    await holding.job_left.wait()
    assert engine.received == [StopJob(job.id, claimed.epoch)]
    step(2)  # computed before the engine received the cancel
    assert holding.tokens_after_cancel == 2
    assert (await caller.view(job)).num_output_tokens == 1
    await end_tasks(publishing)
    await lane.aclose()


async def test_a_cancel_seen_before_an_append_counts_unlogged_tokens(
    redis_client: redis.asyncio.Redis, functions: Functions, keys: Keys
) -> None:
    """Tokens not yet published when the hint arrives. Tokens of a fenced job are not counted."""
    caller = Caller(functions, redis_client, keys)
    engine = Engine()
    link = EngineLink(hash_worker_settings("").engine, client=engine)  # type: ignore[arg-type]
    holding = Holding(link)
    tokenizer = Tokenizer.from_str(hash_tokenizer().tokenizer_json)
    for prompt in ("a", "b"):
        await caller.submit(prompt)
    claims = await functions.claim("w", "m", ("standard",), lease_s=9, max_jobs=2, max_tokens=999)
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
