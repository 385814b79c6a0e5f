"""From a first deployment to zero and back, whatever a cold start takes: the pool's service and the
deployment's trial on a virtual clock, with an emulated ECS and the real functions of Redis."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio

from contract.function_types import Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams, new_job_id
from contract.keys import Keys
from contract.starts import ANY_LANE
from infra.aws.parameters import DeployError
from infra.aws.pool_service import PoolService, PoolWatch
from infra.aws.trial import Trial
from infra.aws.workforce import EcsService
from infra.embedded_redis import EmbeddedRedis
from infra.planning.queue import VirtualQueue
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock
from tests.aws.fake_ecs import EPOCH_S, TICK_S, FakeEcs
from tests.gateway.fake_worker import FakeWorker

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
    """A stack at virtual times. Its front is what the gateway does for the trial; workers answer a
    job at once."""

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
        self.loop = asyncio.get_running_loop()

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
        return bool((await self.job(job_id))["status"] is JobStatus.SUCCEEDED)

    async def submit(self) -> str:
        job = Job(
            id=new_job_id(), tenant="t", model=MODEL, lane="interactive",
            endpoint=Endpoint.COMPLETIONS, prompt_ids=(1, 2), created_s=1,
            params=SamplingParams(max_tokens=16, seed=1),
        )  # fmt: skip
        submission = Submission(16, deadline_s=4_000.0, retention_s=600.0)
        return (await self.queue.functions.submit(job, submission)).job_id

    async def job(self, job_id: str) -> dict[str, Any]:
        found = await self.queue.functions.read(job_id, "t")
        assert found is not None
        status = found[0].status
        waits = None if self.pool.workforce.num_desired() and self.is_announced else "worker"
        return {"status": status, "waiting_for": waits if status is JobStatus.QUEUED else None}

    async def front(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        if path.startswith("/v1/models/"):
            return 200, {"endpoints": ["/v1/completions"] if self.is_announced else []}
        if method == "GET":
            return 200, await self.job(path.rpartition("/")[2])
        if not self.is_announced:
            await self.call()
            return 503, {"error": {"code": "no_workers", "message": "not yet"}}
        return 202, {"id": await self.submit()}

    async def trial_s(self) -> float:
        """Runs the trial as a deployment does; returns how long it took."""
        began_s = self.now_s

        def wait(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()

        trial = Trial(
            lambda *asked: wait(self.front(*asked)), MODEL, "interactive", lambda: False,
            clock_s=lambda: self.now_s, sleep=lambda seconds: wait(self.run_for(seconds)),
        )  # fmt: skip
        await asyncio.to_thread(trial.run)
        return self.now_s - began_s


@pytest.fixture
async def world(server: EmbeddedRedis, cold_start_s: float) -> AsyncIterator[World]:
    world = World(server.url, cold_start_s)
    yield world
    world.queue.close()


COLD_STARTS_S = pytest.mark.parametrize("cold_start_s", [60, 150, 240, 420, 900])


@COLD_STARTS_S
async def test_a_first_deployment_serves_shrinks_and_serves_again(
    world: World, cold_start_s: float
) -> None:
    """The pool has been idle for 20 minutes when the trial begins; nobody has announced the model.
    Later a single call brings a worker back, however long that takes. No starting worker is ended,
    and none outlasts its use."""
    await world.run_for(1_200)
    assert await world.trial_s() <= cold_start_s + 60
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
async def test_a_redeployment_serves_and_shrinks(
    world: World, cold_start_s: float, min_percent: int, max_percent: int
) -> None:
    """At zero, where the trial starts a worker of the new version; and over an idle worker, which
    stays until its successor is ready, or makes room for it where there is none beside it. Then
    both pools end at zero."""
    world.ecs.min_percent, world.ecs.max_percent = min_percent, max_percent
    await world.trial_s()
    await world.run_for(QUIET_S)
    world.ecs.definition = "worker:2"
    assert await world.trial_s() <= cold_start_s + 60
    await world.run_for(100)

    world.ecs.definition = "worker:3"
    await world.run_for(cold_start_s - 15)
    is_beside = max_percent > 100
    former = ["worker:2"] * is_beside
    assert [task.definition for task in world.ecs.tasks] == [*former, "worker:3"]
    assert await world.trial_s() <= (30 if is_beside else 60)
    await world.run_for(30)
    assert [task.definition for task in world.ecs.tasks] == ["worker:3"]
    assert await world.is_answered()
    await world.run_for(QUIET_S)
    assert (world.ecs.num_desired, world.ecs.tasks) == (0, [])
    assert (world.ecs.num_started, world.ecs.ended_starting) == (3, [])


@pytest.mark.parametrize("fails_after_s", [30, 300, 3_700])
@pytest.mark.parametrize("has_former", [False, True])
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


async def test_a_trial_that_cannot_succeed_ends_with_its_reason(
    server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is refused or fails, a worker that ends, a model that has failed, or no answer in
    time. Nothing of the job is printed but its id."""
    job: dict[str, Any] = {"status": "queued", "waiting_for": "worker", "expected_start_s": 200.4}
    model: dict[str, Any] = {"endpoints": ["/v1/responses", "/v1/embeddings"]}
    submission: tuple[int, dict[str, Any]] = (202, {"id": "job-0-x"})
    has_failed, clock, asked = False, Clock(), []

    def ask(method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        if body is not None:
            asked.append(body)
            return submission
        return 200, model if path.startswith("/v1/models") else job

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    def error() -> str:
        trial = Trial(ask, MODEL, "batch", lambda: has_failed, clock, sleep)
        with pytest.raises(DeployError) as raised:
            trial.run()
        return str(raised.value)

    assert error() == "no answer of 'm' within 70 minutes"
    assert "waits for a worker, expected in 200 s" in capsys.readouterr().out
    assert (asked[0]["endpoint"], asked[0]["lane"]) == ("/v1/embeddings", "batch")
    assert asked[0]["deadline_s"] == 4_200  # it does not ask for workers afterwards
    has_failed = True
    assert error() == "a worker ended before it was ready: its log says why"
    has_failed, model = False, model | {"failed": {"reason": "3 workers in a row ended"}}
    assert error() == "the model 'm' has failed: 3 workers in a row ended"
    job = {"status": "failed", "error": {"code": "engine_error"}, "result": "secret"}
    assert error() == "the trial job job-0-x has failed: engine_error"
    submission = (401, {"error": {"code": "invalid_api_key", "message": "wrong"}})
    assert error() == "the trial job was refused: invalid_api_key: wrong"
    submission = (503, {"error": {"code": "model_failed", "message": "3 workers"}})
    assert error() == "the trial job was refused: model_failed: 3 workers"
    submission = (403, {"message": "Forbidden"})  # API Gateway's, of a stage that is new
    assert error() == "no answer of 'm' within 70 minutes"
    assert "secret" not in capsys.readouterr().out
