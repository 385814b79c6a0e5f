"""What takes a flow's jobs: replies about earlier claims, runs that fail, jobs of a model."""

import asyncio
from collections.abc import Sequence

import pytest
import redis.asyncio

from contract.function_types import Claimed
from contract.functions import Functions
from contract.jobs import JobStatus
from contract.keys import Keys
from gateway.redis.broker import Broker
from gateway.runners.flows.run import FlowPublisher, Run
from gateway.runners.flows.worker import FlowWorker
from gateway.state import Gateway
from infra.embedded_redis import EmbeddedRedis
from tests.contract.some_calls import claim, make_job, make_submission, pass_time
from tests.contract.test_flow_jobs import make_parent
from tests.gateway.conftest import make_settings

pytestmark = pytest.mark.anyio


class StuckRun:
    """Neither ends nor calls anything."""

    def __init__(self, functions: Functions, claimed: Claimed) -> None:
        self.claimed = claimed
        self.job = claimed.job
        self.has_cancelled = asyncio.Event()
        self._functions = functions

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def is_over(self) -> bool:
        found = await self._functions.read(self.job.id, self.job.tenant)
        return found is not None and found[0].is_terminal

    async def cancel_calls(self) -> None:
        self.has_cancelled.set()


class FailingRun(StuckRun):
    async def run(self) -> None:
        raise RuntimeError("a bug")


class Place:
    """A worker of the flow `m` whose duties the test calls."""

    def __init__(
        self, client: redis.asyncio.Redis, keys: Keys, kind: type[StuckRun] = StuckRun
    ) -> None:
        self.functions = Functions(client, keys)
        self.runs: list[StuckRun] = []
        self._kind = kind
        self.worker = FlowWorker(client, keys, "m", ("standard",), self._make)  # type: ignore[arg-type]

    def _make(self, _: FlowPublisher, claimed: Claimed) -> StuckRun:
        self.runs.append(self._kind(self.functions, claimed))
        return self.runs[-1]

    async def claim(self) -> int:
        return await self.worker._start(await self.worker._claim())


async def test_a_late_reply_about_an_earlier_claim_stops_nothing(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job was lost, and claimed again before the reply to the heartbeat came."""
    job = make_parent()
    await functions.submit(job, make_submission(deadline_s=600.0))
    place = Place(redis_client, keys)
    await place.claim()
    await pass_time(redis_client, keys, 11.0)
    await functions.sweep()
    heartbeat = place.worker._functions.heartbeat

    async def late(*args: object, **more: object) -> Sequence[str]:
        lost = await heartbeat(*args, **more)  # type: ignore[arg-type]
        assert await place.claim() == 1
        return lost

    monkeypatch.setattr(place.worker._functions, "heartbeat", late)
    await place.worker._report()
    assert place.worker._held[job.id][0] is place.runs[1]  # type: ignore[comparison-overlap]
    monkeypatch.undo()
    await place.worker.aclose()


async def test_a_run_that_fails_for_the_last_time_cancels_its_calls(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    job = make_parent()
    await functions.submit(job, make_submission(max_attempts=1))
    place = Place(redis_client, keys, FailingRun)
    await place.claim()
    await asyncio.wait_for(place.runs[0].has_cancelled.wait(), 10)
    view, _ = await functions.read(job.id, "t") or (None, None)
    assert view is not None
    assert view.status is JobStatus.FAILED
    await place.worker.aclose()


async def test_a_job_of_a_model_with_the_flow_s_name_goes_back(
    functions: Functions, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """To the model's workers; no attempt is counted, and the flow takes nothing more."""
    job = make_job()
    await functions.submit(job, make_submission())
    place = Place(redis_client, keys)
    await place.claim()
    assert place.runs == []
    [claimed] = await claim(functions)
    assert (claimed.job.id, claimed.attempt) == (job.id, 1)
    assert place.worker.is_draining
    await place.worker.aclose()


async def test_a_run_that_begins_again_has_the_deadline_that_its_job_has_now(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
) -> None:
    """The message that it was moved is lost."""
    job = make_parent()
    await functions.submit(job, make_submission(deadline_s=60.0))
    [claimed] = await claim(functions)
    settings = make_settings(redis_server.url)
    broker = Broker(settings, clock=lambda: 0.0)
    publisher = FlowPublisher(functions, "w1", 10.0)
    run = Run(Gateway(settings, broker), publisher, claimed, None)
    await run._read_log()
    before_s = run._calls.deadline_s
    await functions.reprioritise(job.id, "t", deadline_s=600.0)
    await run._read_log()
    assert run._calls.deadline_s - before_s == pytest.approx(540.0, abs=5.0)
    await broker.aclose()
