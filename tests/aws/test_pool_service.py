"""The pool's service against a real Redis and an emulated ECS."""

import argparse
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.aws.pool_metrics import spread
from infra.aws.pool_service import PoolService, PoolWatch, build_parser, policy_of
from infra.aws.workforce import EcsService
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock, Invoke
from tests.aws.lambda_events import rest_event
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
    metrics = next(record for record in map(json.loads, reversed(lines)) if "Lane" not in record)
    names = [metric["Name"] for metric in metrics["_aws"]["CloudWatchMetrics"][0]["Metrics"]]
    assert set(names) == set(metrics) - {"_aws", "Model"}
    assert metrics["DesiredWorkers"] == 1
    assert metrics["StrandedTokens"] > 0
    assert metrics["Model"] == MODEL


async def test_a_refused_call_starts_the_first_worker(
    service: PoolService, ecs: EcsService, invoke: Invoke
) -> None:
    """It is told when the worker is ready, and leaves no job."""
    assert (await service.step()).num_workers == 0
    answer = await invoke(rest_event("POST", "/v1/completions", JOB["body"]))
    assert answer["statusCode"] == 503
    assert 290 <= int(answer["headers"]["retry-after"]) <= 400  # with jitter
    decision = await service.step()
    assert (decision.num_workers, decision.reason, decision.backlog_s) == (1, "from zero", 0.0)
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


class StoppedTasks:
    """An ECS with ended tasks, in the format of DescribeTasks."""

    num_desired = 3

    def __init__(self, *tasks: dict[str, Any]) -> None:
        self.tasks = [
            {"taskArn": f"t{number}", "stoppedAt": datetime.fromtimestamp(100, UTC), **task}
            for number, task in enumerate(tasks)
        ]
        self.running: list[dict[str, Any]] = []

    def list_tasks(self, *, desiredStatus: str, **_: Any) -> dict[str, Any]:
        shown = self.tasks if desiredStatus == "STOPPED" else self.running
        return {"taskArns": [task["taskArn"] for task in shown]}

    def describe_tasks(self, *, tasks: list[str], **_: Any) -> dict[str, Any]:
        known = [*self.tasks, *self.running]
        return {"tasks": [task for task in known if task["taskArn"] in tasks]}

    def describe_services(self, **_: Any) -> dict[str, Any]:
        return {"services": [{"desiredCount": self.num_desired, "taskDefinition": "t"}]}

    def update_service(self, *, desiredCount: int, **_: Any) -> None:
        self.num_desired = desiredCount

    def end(self, arn: str, at_s: float) -> None:
        """Ends a task with an error."""
        self.running = [task for task in self.running if task["taskArn"] != arn]
        self.tasks.append(
            {
                "taskArn": arn,
                "stopCode": "EssentialContainerExited",
                "containers": [{"exitCode": 3}],
                "stoppedAt": datetime.fromtimestamp(at_s, UTC),
            }
        )


def test_only_tasks_that_end_with_an_error_count_as_failed() -> None:
    """Tasks that were stopped, found no machine, lost it, or exited with 0 do not."""
    ended: Any = StoppedTasks(
        {"stopCode": "EssentialContainerExited", "containers": [{"exitCode": 3}]},
        {"stopCode": "EssentialContainerExited", "containers": [{"exitCode": 0}]},
        {"stopCode": "TaskFailedToStart", "containers": [{}]},
        {"stopCode": "ServiceSchedulerInitiated", "containers": [{"exitCode": 137}]},
        {"stopCode": "SpotInterruption", "containers": [{"exitCode": 137}]},
        {"stopCode": "TaskFailedToStart", "stoppedReason": "Capacity is unavailable at this time"},
    )
    failed = EcsService(ended, "c", "s").failed()
    assert [(task.name, task.at_s) for task in failed] == [("t0", 100.0), ("t2", 100.0)]
    assert EcsService(StoppedTasks(), "c", "s").failed() == []


@pytest.mark.parametrize("were_ready", [True, False])
async def test_the_breaker_opens_for_tasks_that_were_never_ready(
    service: PoolService, invoke: Invoke, were_ready: bool
) -> None:
    """It stays closed for three failed tasks that were healthy at any earlier time."""
    client: Any = StoppedTasks()
    service.workforce = EcsService(client, "c", "s")
    health = "HEALTHY" if were_ready else "UNKNOWN"
    client.running = [{"taskArn": f"r{n}", "healthStatus": health} for n in range(3)]
    await invoke(rest_event("POST", "/v1/jobs", JOB))
    assert not (await service.step()).is_breaker_open

    service.clock_s.now_s += 600.0  # type: ignore[attr-defined]
    client.running = [task | {"healthStatus": "UNHEALTHY"} for task in client.running]
    await service.step()
    for number in range(3):
        client.end(f"r{number}", service.clock_s() - number)

    assert (await service.step()).is_breaker_open is not were_ready
    # ECS forgets them after an hour, and then so does the pool.
    client.tasks = []
    service.clock_s.now_s += 7200.0  # type: ignore[attr-defined]
    await service.step()
    assert not service.healthy_at_s


def test_a_missing_service_is_an_error(ecs: EcsService) -> None:
    """It is not polled again and again."""
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
        return next(record for record in records if record.get("Lane") == "standard")

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
