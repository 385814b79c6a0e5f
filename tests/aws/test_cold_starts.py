"""From a first deployment to zero and back, whatever a cold start takes: the pool's service and a
caller on a virtual clock, with an emulated ECS and the real functions of Redis."""

import math
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio

from contract.function_types import Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.starts import ANY_LANE
from infra.aws.pool_service import PoolService, PoolWatch
from infra.aws.workforce import EcsService
from infra.embedded_redis import EmbeddedRedis
from infra.planning.queue import VirtualQueue
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock
from tests.aws.fake_ecs import EPOCH_S, TICK_S, FakeEcs
from tests.gateway.fake_worker import FakeWorker
from tests.marks import LONG

pytestmark = pytest.mark.anyio

MODEL = "m"
LANES = ("interactive", "standard", "batch")
POLICY = PoolPolicy(wait_targets_s={"interactive": 5.0, "standard": 60.0, "batch": 900.0})
LIVES_S = POLICY.cold_start_s + 60.0  # of a wish, as a gateway makes it: until its caller returns
QUIET_S = LIVES_S + POLICY.scale_in_after_s + 60.0  # until an idle pool is at zero


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@dataclass
class World:
    """A stack at virtual times. Workers answer a job at once."""

    url: str
    cold_start_s: float
    now_s: float = EPOCH_S
    wishes: dict[str, float] = field(default_factory=dict)  # keys, with their ends
    is_announced: bool = False

    def __post_init__(self) -> None:
        self.queue = VirtualQueue(self.url, lambda: int(self.now_s * 1000))
        ticks = math.ceil(self.cold_start_s / TICK_S)
        self.ecs = FakeEcs(random.Random(0), num_desired=0, start_ticks=ticks)
        clock = lambda: self.now_s  # noqa: E731
        watch = PoolWatch(self.queue.client, self.queue.keys, MODEL, LANES)
        service = EcsService(self.ecs, "c", "s", clock)
        functions = self.queue.functions
        self.pool = PoolService(POLICY, watch, functions, service, emit=len, clock_s=clock)

    async def run_for(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds / TICK_S)):
            await self._tick()

    async def _tick(self) -> None:
        before = {task.incarnation for task in self.ecs.tasks}
        self.ecs.tick()
        self.now_s += TICK_S
        for name in before - {task.incarnation for task in self.ecs.tasks}:
            await self.queue.functions.leave(name, MODEL)
        for key in [key for key, until_s in self.wishes.items() if until_s <= self.now_s]:
            del self.wishes[key]
            await self.queue.client.delete(key)
        for task in self.ecs.tasks:
            if task.ready_tick <= self.ecs.now:
                self.is_announced = True
                await self._serve(task.incarnation)
                order = self.queue.keys.of("worker", task.incarnation)
                task.is_draining |= await self.queue.client.hget(order, "order") == b"drain"
        await self.pool.step()

    async def _serve(self, incarnation: str) -> None:
        worker = FakeWorker(self.queue.functions, MODEL, incarnation)
        await worker.beat()
        limits: dict[str, Any] = {"lease_s": 10.0, "max_jobs": 8, "max_tokens": 10_000}
        for claimed in await self.queue.functions.claim(incarnation, MODEL, LANES, **limits):
            await worker.run(claimed)

    async def call(self) -> float | None:
        """A refused call: leaves its wish as a gateway does, and returns when to come again."""
        await self.queue.starts.want(MODEL, ANY_LANE, LIVES_S)
        self.wishes[self.queue.keys.of("wanted", MODEL, ANY_LANE)] = self.now_s + LIVES_S
        start = await self.queue.starts.expected(MODEL)
        return None if start is None else start.ready_in_s

    async def is_answered(self) -> bool:
        """Whether a job is answered within a quarter of a minute."""
        job_id = await self.submit()
        await self.run_for(15)
        return await self.job(job_id) is JobStatus.SUCCEEDED

    async def submit(self) -> str:
        job = Job(
            id=new_job_id(), tenant="t", model=MODEL, lane="interactive",
            endpoint=Endpoint.COMPLETIONS, prompt_ids=(1, 2), created_s=1,
            params=SamplingParams(max_tokens=16, seed=1),
        )  # fmt: skip
        submission = Submission(16, deadline_s=4_000.0, retention_s=600.0)
        return (await self.queue.functions.submit(job, submission)).job_id

    async def job(self, job_id: str) -> JobStatus:
        found = await self.queue.functions.read(job_id, "t")
        assert found is not None
        return found[0].status

    async def answer_s(self) -> float:
        """How long a caller waits for an answer who comes again every 10 s while nobody serves the
        model."""
        began_s, job_id = self.now_s, ""
        while not job_id or await self.job(job_id) is not JobStatus.SUCCEEDED:
            assert self.now_s - began_s < 4_200.0
            if self.is_announced:
                job_id = job_id or await self.submit()
            else:
                await self.call()
            await self.run_for(10)
        return self.now_s - began_s


@pytest.fixture
async def world(server: EmbeddedRedis, cold_start_s: float) -> AsyncIterator[World]:
    world = World(server.url, cold_start_s)
    yield world
    world.queue.close()


COLD_STARTS_S = pytest.mark.parametrize(
    "cold_start_s", [60, *(pytest.param(s, marks=LONG) for s in (150, 240, 420)), 900]
)


@pytest.mark.campaign
@COLD_STARTS_S
async def test_a_first_deployment_serves_shrinks_and_serves_again(
    world: World, cold_start_s: float
) -> None:
    """The pool has been idle for 20 minutes at the first call; nobody has announced the model.
    Later a single call brings a worker back, however long that takes. No starting worker is ended,
    and none outlasts its use."""
    await world.run_for(1_200)
    assert await world.answer_s() <= cold_start_s + 60
    assert await world.is_answered()
    await world.run_for(QUIET_S)
    assert (world.ecs.num_desired, world.ecs.tasks) == (0, [])

    await world.run_for(3_600)
    expected_s = await world.call()
    assert expected_s is not None
    assert expected_s <= POLICY.cold_start_s
    await world.run_for(cold_start_s + 15)
    assert await world.is_answered()
    await world.run_for(QUIET_S)
    assert (world.ecs.num_desired, world.ecs.tasks) == (0, [])
    assert (world.ecs.num_started, world.ecs.ended_starting) == (2, [])


@pytest.mark.parametrize(("min_percent", "max_percent"), [(100, 200), (50, 100)])
@COLD_STARTS_S
@pytest.mark.each_value
async def test_a_redeployment_serves_and_shrinks(
    world: World, cold_start_s: float, min_percent: int, max_percent: int
) -> None:
    """At zero, where a call starts a worker of the new version; and over an idle worker, which
    stays until its successor is ready, or makes room for it where there is none beside it. Then
    both pools end at zero."""
    world.ecs.min_percent, world.ecs.max_percent = min_percent, max_percent
    await world.answer_s()
    await world.run_for(QUIET_S)
    world.ecs.definition = "worker:2"
    assert await world.answer_s() <= cold_start_s + 60
    await world.run_for(100)

    world.ecs.definition = "worker:3"
    await world.run_for(cold_start_s - 15)
    is_beside = max_percent > 100
    former = ["worker:2"] * is_beside
    assert [task.definition for task in world.ecs.tasks] == [*former, "worker:3"]
    assert await world.answer_s() <= (30 if is_beside else 60)
    await world.run_for(30)
    assert [task.definition for task in world.ecs.tasks] == ["worker:3"]
    assert await world.is_answered()
    await world.run_for(QUIET_S)
    assert (world.ecs.num_desired, world.ecs.tasks) == (0, [])
    assert (world.ecs.num_started, world.ecs.ended_starting) == (3, [])


@pytest.mark.campaign
@pytest.mark.parametrize("fails_after_s", [30, 300, 3_700])
@pytest.mark.parametrize("has_former", [False, True])
@pytest.mark.each_value
async def test_a_model_that_can_never_load_stops_its_starts(
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
    fails_after_s: int,
    has_former: bool,
) -> None:
    """However late its health check or its process ends it, and with or without a ready worker of
    the former version, which goes on. In two days it is tried eleven times; ECS starts a task more
    for each try, until the pool has seen that it failed."""
    reason = {
        "stopCode": "ServiceSchedulerInitiated",
        "stoppedReason": "Task failed container health checks",
    }
    unfit = {"worker:2": math.ceil(fails_after_s / TICK_S)}
    ecs = FakeEcs(random.Random(0), int(has_former), unfit=unfit, reason=reason)
    ecs.start(int(has_former), is_ready=True)
    ecs.definition = "worker:2"
    clock = Clock()
    service = EcsService(ecs, "c", "s", clock)
    watch = PoolWatch(redis_client, keys, MODEL, LANES)
    pool = PoolService(POLICY, watch, functions, service, emit=len, clock_s=clock)
    starting_s, num_ticks = 0.0, int(2 * 86_400 / TICK_S)
    for tick in range(num_ticks):
        ecs.tick()
        clock.now_s = EPOCH_S + ecs.now * TICK_S
        starting_s += TICK_S * sum(task.ready_tick > ecs.now for task in ecs.tasks)
        _, retired = pool.size(ecs.sight(load=0.5, queued_tokens=10_000))
        assert not retired, tick
    assert ecs.num_started - has_former <= 2 * 11
    assert starting_s <= 11 * (fails_after_s + 2 * TICK_S)
    assert len(ecs.sight().workers) == has_former
