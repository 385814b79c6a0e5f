"""The pool's service against a real Redis and an emulated ECS."""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from contract.pauses import PauseLine, Pauses
from infra.aws.pool_metrics import spread
from infra.aws.pool_service import PoolService, PoolWatch, build_parser, policy_of
from infra.aws.workforce import EcsService
from infra.embedded_redis import EmbeddedRedis
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock, Invoke, running_function
from tests.aws.fake_ecs import EPOCH_S, TICK_S, FakeEcs, Task
from tests.aws.lambda_events import KEY, rest_event
from tests.fleet import until
from tests.gateway.conftest import make_settings
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

JOB = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
POLICY = PoolPolicy(wait_targets_s={"interactive": 5.0, "standard": 60.0}, scale_in_after_s=60.0)


@pytest.fixture
def ecs(aws_environ: dict[str, str]) -> Iterator[EcsService]:
    """An ECS service without tasks."""
    client = boto3.client("ecs")
    client.create_cluster(clusterName="c")
    task = client.register_task_definition(
        family="worker", containerDefinitions=[{"name": "worker", "image": "i", "memory": 1}]
    )
    arn = task["taskDefinition"]["taskDefinitionArn"]
    client.create_service(cluster="c", serviceName="s", taskDefinition=arn, desiredCount=0)
    yield EcsService(client, "c", "s")
    client.delete_service(cluster="c", service="s", force=True)


@pytest.fixture
async def service(
    ecs: EcsService, redis_client: redis.asyncio.Redis, keys: Keys, functions: Functions
) -> PoolService:
    await publish_model(redis_client, keys)
    watch = PoolWatch(redis_client, keys, MODEL, tuple(POLICY.wait_targets_s))
    lines: list[str] = []
    return PoolService(POLICY, watch, functions, ecs, emit=lines.append, clock_s=Clock())


async def test_a_waiting_job_starts_the_first_worker(
    service: PoolService, ecs: EcsService, invoke: Invoke
) -> None:
    """From zero to one, once. The observed values are emitted as metrics."""
    lines: list[str] = []
    service.emit = lines.append
    assert (await service.step()).num_workers == 0
    await invoke(rest_event("POST", "/v1/jobs", JOB))

    first = await service.step()
    second = await service.step()

    assert (first.num_workers, first.reason) == (1, "from zero")
    assert (second.num_workers, second.eta_s) == (1, 300.0)
    assert ecs.num_desired() == 1
    metrics = next(
        record for record in map(json.loads, reversed(lines)) if "DesiredWorkers" in record
    )
    names = [metric["Name"] for metric in metrics["_aws"]["CloudWatchMetrics"][0]["Metrics"]]
    assert set(names) == set(metrics) - {"_aws", "Model"}
    assert metrics["DesiredWorkers"] == 1
    assert metrics["StrandedTokens"] > 0
    assert metrics["Model"] == MODEL


async def test_a_refused_call_starts_the_first_worker(
    service: PoolService, ecs: EcsService, invoke: Invoke
) -> None:
    """It is told when the worker is ready, and leaves no job. A metric tells of it until then."""
    stranded: list[int] = []
    service.emit = lambda line: stranded.append(json.loads(line).get("StrandedCalls"))
    assert (await service.step()).num_workers == 0
    answer = await invoke(rest_event("POST", "/v1/completions", JOB["body"]))
    assert answer["statusCode"] == 503
    assert 290 <= int(answer["headers"]["retry-after"]) <= 400  # with jitter
    decision = await service.step()
    assert (decision.num_workers, decision.reason, decision.backlog_s) == (1, "from zero", 0.0)
    assert ecs.num_desired() == 1
    await FakeWorker(service.functions).beat()
    await service.step()
    assert [one for one in stranded if one is not None] == [0, 1, 0]


async def test_a_deadline_within_the_cold_start_starts_the_first_worker(
    service: PoolService, ecs: EcsService, redis_server: EmbeddedRedis
) -> None:
    """Such a job is refused, and leaves nothing else by which the pool could know of it."""
    settings = make_settings(redis_server.url, api_key=KEY, cold_start_s=300.0)
    async with running_function(settings) as invoke:
        answer = await invoke(rest_event("POST", "/v1/jobs", JOB | {"deadline_s": 60}))
    assert json.loads(answer["body"])["error"]["code"] == "deadline_infeasible"
    assert (await service.step()).reason == "from zero"
    assert ecs.num_desired() == 1


async def test_a_refused_call_is_forgotten(
    service: PoolService, invoke: Invoke, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A minute after its worker should be ready; the pool's model and lanes alone count."""
    await invoke(rest_event("POST", "/v1/completions", JOB["body"]))
    left_ms = await redis_client.pttl(keys.of("wanted", MODEL, "standard"))
    cold_start_ms = make_settings("redis://").cold_start_s * 1000
    assert cold_start_ms < left_ms <= cold_start_ms + 60_000
    await redis_client.rename(
        keys.of("wanted", MODEL, "standard"), keys.of("wanted", MODEL, "batch")
    )
    assert (await service.step()).num_workers == 0


async def test_the_emptiest_worker_is_drained(
    service: PoolService, ecs: EcsService, functions: Functions, invoke: Invoke
) -> None:
    """The worker with a job stays; ECS's desired count is lowered, and the other worker is ordered
    to drain."""
    busy, idle = FakeWorker(functions, incarnation="w1"), FakeWorker(functions, incarnation="w2")
    await idle.beat()
    await busy.beat()
    await invoke(rest_event("POST", "/v1/jobs", JOB))
    claimed = await busy.claim()
    info = '{"num_blocks": 10, "num_free_blocks": 9}'
    await functions.heartbeat(
        "w1", MODEL, [(claimed.job.id, claimed.epoch)], lease_s=10.0, info=info
    )
    ecs.resize(2)

    assert (await service.step()).num_workers == 2
    service.clock_s.now_s += 60.0  # type: ignore[attr-defined]
    decision = await service.step()

    assert (decision.num_workers, decision.num_to_retire) == (1, 1)
    assert ecs.num_desired() == 1
    client = service.watch.client
    orders = [
        await client.hget(service.watch.keys.of("worker", name), "order") for name in ("w1", "w2")
    ]
    assert orders == [None, b"drain"]


async def test_a_draining_worker_does_not_count(service: PoolService, functions: Functions) -> None:
    """It takes no jobs."""
    worker = FakeWorker(functions)
    await worker.beat()
    assert len((await service.watch.look()).workers) == 1
    await service.watch.client.hset(service.watch.keys.of("worker", "w1"), "state", "draining")
    assert not (await service.watch.look()).workers


@pytest.mark.parametrize(
    "line", [PauseLine(lane="standard"), PauseLine(tenant="default"), PauseLine(model=MODEL)]
)
async def test_paused_jobs_start_no_worker(
    service: PoolService, invoke: Invoke, keys: Keys, line: PauseLine
) -> None:
    """Nobody would run them."""
    await invoke(rest_event("POST", "/v1/jobs", JOB))
    waiting = (await service.watch.look()).queued_tokens["standard"]
    pauses = Pauses(service.watch.client, keys)
    await pauses.pause(line, "operator")
    paused = (await service.watch.look()).queued_tokens["standard"]
    await pauses.resume(line, "operator")
    resumed = (await service.watch.look()).queued_tokens["standard"]
    assert (waiting > 0, paused, resumed) == (True, 0, waiting)


FAILED = {"stopCode": "EssentialContainerExited", "containers": [{"exitCode": 3}]}


def test_only_tasks_that_end_with_an_error_count_as_failed() -> None:
    """Also by the health check, whatever the container then exits with. Tasks that were stopped,
    found no machine, lost it, or exited with 0 do not."""
    ends: list[dict[str, Any]] = [
        FAILED,
        {"stopCode": "EssentialContainerExited", "containers": [{"exitCode": 0}]},
        {"stopCode": "TaskFailedToStart", "containers": [{}]},
        {"stopCode": "ServiceSchedulerInitiated", "containers": [{"exitCode": 137}]},
        {"stopCode": "SpotInterruption", "containers": [{"exitCode": 137}]},
        {"stopCode": "TaskFailedToStart", "stoppedReason": "Capacity is unavailable at this time"},
        {"stopCode": "EssentialContainerExited", "containers": [{"exitCode": 143}]},
        {
            "stopCode": "ServiceSchedulerInitiated",
            "stoppedReason": "Task failed container health checks",
            "containers": [{"exitCode": 0}],
        },
    ]
    fake = FakeEcs(random.Random(0), num_desired=3)
    assert EcsService(fake, "c", "s").failed() == []
    fake.stopped = [(Task(n, "worker:1", 0, reason=end), 0) for n, end in enumerate(ends)]
    fake.stopped.append((Task(8, "worker:0", 0, reason=FAILED), 0))  # of an earlier version
    failed = EcsService(fake, "c", "s").failed()
    assert [task.name for task in failed] == [fake.stopped[n][0].arn for n in (0, 2, 6, 7)]
    assert {task.at_s for task in failed} == {EPOCH_S}


@pytest.fixture
async def fake(service: PoolService, invoke: Invoke) -> FakeEcs:
    """What the pool sees of ECS: three tasks, whose failures are errors. A job waits."""
    fake = FakeEcs(random.Random(0), num_desired=3, reason=FAILED)
    fake.start(3)
    service.workforce = EcsService(fake, "c", "s")
    await invoke(rest_event("POST", "/v1/jobs", JOB))
    return fake


def pass_time(service: PoolService, fake: FakeEcs, seconds: float) -> None:
    service.clock_s.now_s += seconds  # type: ignore[attr-defined]
    fake.now += int(seconds / TICK_S)


@pytest.mark.parametrize("were_ready", [True, False])
async def test_the_breaker_opens_for_tasks_that_were_never_ready(
    service: PoolService, fake: FakeEcs, functions: Functions, were_ready: bool
) -> None:
    """It stays closed for three failed tasks whose workers took jobs at any earlier time."""
    names = [task.incarnation for task in fake.tasks] if were_ready else []
    for name in names:
        await FakeWorker(functions, incarnation=name).beat()
    assert not (await service.step()).is_breaker_open

    for task in list(fake.tasks):
        pass_time(service, fake, 300.0)
        fake.fail(task)
    for name in names:
        await functions.leave(name, MODEL)

    assert (await service.step()).is_breaker_open is not were_ready


async def test_failures_count_until_a_worker_is_ready_or_another_version_runs(
    service: PoolService, fake: FakeEcs, functions: Functions
) -> None:
    """Also those that ECS has forgotten meanwhile."""

    async def fail() -> bool:
        pass_time(service, fake, 4_000.0)  # ECS shows them for an hour
        fake.start(1)
        fake.fail(fake.tasks[-1])
        return (await service.step()).is_breaker_open

    assert [await fail() for _ in range(3)] == [False, False, True]
    fake.definition = "worker:2"
    assert not (await service.step()).is_breaker_open
    assert [await fail() for _ in range(2)] == [False, False]
    await FakeWorker(functions, incarnation=fake.tasks[0].incarnation).beat()
    await service.step()
    assert [await fail() for _ in range(3)] == [False, False, True]


async def test_a_pool_that_stops_its_starts_says_so(
    service: PoolService, fake: FakeEcs, invoke: Invoke, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in its log, as a metric, and to callers with the time of the next try. After the next
    version's start no more."""
    lines: list[str] = []
    service.emit = lines.append
    call = rest_event("POST", "/v1/completions", JOB["body"])
    await service.step()
    fake.now += 1
    for task in list(fake.tasks):
        fake.fail(task)
    for _ in range(3):
        await service.step()
    logged = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [text.partition(":")[0] for text in logged] == ["no worker is started for 905 s"]
    metrics = [json.loads(line) for line in lines if "BreakerOpen" in line]
    assert [(one["BreakerOpen"], one["FailedStarts"]) for one in metrics[1:]] == [(1, 3)] * 3
    answer = await refused_with("model_failed", invoke, call)
    error = json.loads(answer["body"])["error"]
    assert "3 workers in a row ended before they were ready" in error["message"]
    assert int(answer["headers"]["retry-after"]) >= 890
    fake.definition = "worker:2"
    await service.step()
    await refused_with("no_workers", invoke, call)


async def refused_with(code: str, invoke: Invoke, call: dict[str, Any]) -> dict[str, Any]:
    """The first refusal with this code: a gateway knows of failures a second late."""
    answers: list[dict[str, Any]] = []

    async def is_refused() -> bool:
        answers.append(await invoke(call))
        return bool(json.loads(answers[-1]["body"])["error"]["code"] == code)

    await until(is_refused)
    assert answers[-1]["statusCode"] == 503
    return answers[-1]


def test_a_missing_service_is_an_error(ecs: EcsService) -> None:
    with pytest.raises(LookupError, match="no service 'x'"):
        EcsService(ecs.client, "c", "x").num_desired()


def test_options_become_a_policy() -> None:
    """The lanes of this pool alone, in their order. An error names a lane without a target."""
    needed = ["--ecs-cluster=c", "--ecs-service=s", "--model-name=m"]
    given = build_parser().parse_args([*needed, "--lanes=standard,batch", "--max-workers=9"])
    assert policy_of(given).wait_targets_s == {"standard": 60.0, "batch": 900.0}
    assert policy_of(given).max_workers == 9
    with pytest.raises(ValueError, match="'batch'"):
        policy_of(build_parser().parse_args([*needed, "--wait-targets=interactive=5,standard=9"]))
    with pytest.raises((argparse.ArgumentTypeError, SystemExit)):
        build_parser().parse_args([*needed, "--wait-targets=interactive"])


async def test_events_are_counted_once_per_lane(
    service: PoolService, functions: Functions, invoke: Invoke
) -> None:
    """Waiting jobs as they are now; tokens and ended jobs since the previous step; first tokens by
    bucket."""
    lines: list[str] = []
    service.emit = lines.append

    async def look() -> dict[str, Any]:
        lines.clear()
        await service.step()
        records = [json.loads(line) for line in lines]
        [lane] = [record for record in records if record.get("Lane") == "standard"]
        [of_all] = [r for r in records if "JobsSucceeded" in r and "Lane" not in r]
        for name in ("JobsSucceeded", "JobsFailed"):  # other lanes have no jobs here
            assert of_all[name] == lane[name]
        found: dict[str, Any] = lane
        return found

    worker = FakeWorker(functions)
    await worker.beat()
    await invoke(rest_event("POST", "/v1/jobs", JOB))
    waiting = await look()
    assert (waiting["WaitingJobs"], waiting["RunningJobs"], waiting["OutputTokens"]) == (1, 0, 0)
    await worker.run(await worker.claim())
    done, later = await look(), await look()
    assert (done["WaitingJobs"], done["JobsSucceeded"], done["PromptTokens"]) == (0, 1, 2)
    assert done["OutputTokens"] > 0
    assert len(done["FirstTokenS"]) == 1
    assert (later["JobsSucceeded"], later["OutputTokens"]) == (0, 0)
    assert "FirstTokenS" not in later
    [about] = done["_aws"]["CloudWatchMetrics"]
    names = {metric["Name"] for metric in about["Metrics"]}
    assert names == set(done) - {"_aws", "Model", "Lane"}


def test_many_first_tokens_keep_their_proportions() -> None:
    """CloudWatch accepts 100 values of a metric per record; rare values are kept."""
    few = spread([0, 3, 0, 1] + [0] * 13)
    assert few == [0.01, 0.01, 0.01, 0.05]
    many = spread([9_000, 900, 0, 1] + [0] * 12 + [99])
    assert len(many) <= 100
    assert many.count(0.005) > 7 * many.count(0.01) > 0
    assert 0.05 in many
    assert many[-1] == 7200.0
