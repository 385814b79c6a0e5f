"""A pool on an Auto Scaling group, and its metrics by PutMetricData, against moto."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.aws.pool_metrics import EVERY_S, MetricSender
from infra.aws.pool_service import PoolService, PoolWatch, build_parser, emitter_of, workforce_of
from infra.aws.workforce import Failed, ScalingGroup
from infra.pool import PoolPolicy
from tests.aws.conftest import Clock, Invoke
from tests.aws.lambda_events import rest_event
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

JOB = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
POLICY = PoolPolicy(wait_targets_s={"interactive": 5.0, "standard": 60.0}, scale_in_after_s=60.0)


@pytest.fixture
def group(aws_environ: dict[str, str]) -> Iterator[ScalingGroup]:
    """An empty group, whose machines are ready at once."""
    client = boto3.client("autoscaling")
    client.create_launch_configuration(
        LaunchConfigurationName="gpu", ImageId="ami-12c6146b", InstanceType="g6.xlarge"
    )
    client.create_auto_scaling_group(
        AutoScalingGroupName="machines",
        LaunchConfigurationName="gpu",
        AvailabilityZones=["eu-central-1a"],
        MinSize=0,
        MaxSize=4,
        DesiredCapacity=0,
    )
    yield ScalingGroup(client, "machines")
    client.delete_auto_scaling_group(AutoScalingGroupName="machines", ForceDelete=True)
    client.delete_launch_configuration(LaunchConfigurationName="gpu")


def machines(group: ScalingGroup) -> dict[str, bool]:
    """Whether each of the group's machines is protected, by machine id."""
    found = group.client.describe_auto_scaling_groups(AutoScalingGroupNames=[group.name])
    [described] = found["AutoScalingGroups"]
    return {m["InstanceId"]: m["ProtectedFromScaleIn"] for m in described["Instances"]}


def test_machines_are_kept_while_their_worker_sends_heartbeats(group: ScalingGroup) -> None:
    """The group ends another machine, although it is younger. Protection is removed later."""
    group.resize(3)
    one, two, three = machines(group)
    kept = group.keep([f"{one}-7-ab", f"{three}-8-cd", "elsewhere-9-ef"])
    assert machines(group) == {one: True, two: False, three: True}
    assert sorted(kept) == sorted([one, three])

    group.resize(2)
    assert (group.num_desired(), set(machines(group))) == (2, {one, three})
    group.keep([f"{three}-8-cd"])
    assert machines(group) == {one: False, three: True}


def test_machines_with_a_common_name_prefix_are_distinguished(group: ScalingGroup) -> None:
    group.resize(1)
    [machine] = machines(group)
    group.keep([f"{machine}0-7-ab"])
    assert machines(group) == {machine: False}


async def test_the_pool_starts_machines_and_ends_idle_ones(
    group: ScalingGroup,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    functions: Functions,
    invoke: Invoke,
) -> None:
    """From zero to one for a job; of two machines the busy one is kept, and the other's worker
    drains. No machine is ended whose worker still starts."""
    await publish_model(redis_client, keys)
    clock = Clock()
    watch = PoolWatch(redis_client, keys, MODEL, tuple(POLICY.wait_targets_s))
    lines: list[str] = []
    service = PoolService(POLICY, watch, functions, group, emit=lines.append, clock_s=clock)
    await invoke(rest_event("POST", "/v1/jobs", JOB))
    assert (await service.step()).reason == "from zero"
    assert len(machines(group)) == 1

    group.resize(2)
    first, second = machines(group)
    idle = FakeWorker(functions, incarnation=f"{first}-7-ab")
    busy = FakeWorker(functions, incarnation=f"{second}-7-ab")
    await busy.beat()
    claimed = await busy.claim()
    info = '{"num_blocks": 10, "num_free_blocks": 9}'
    held = [(claimed.job.id, claimed.epoch)]
    await functions.heartbeat(busy.incarnation, MODEL, held, lease_s=10.0, info=info)
    await service.step()
    clock.now_s += 60.0
    assert (await service.step()).reason == "starting"
    await idle.beat()
    await service.step()
    clock.now_s += 60.0
    assert (await service.step()).num_workers == 1
    assert machines(group) == {first: True, second: True}
    await functions.leave(idle.incarnation, MODEL)
    await service.step()
    assert machines(group) == {first: False, second: True}


class Activities:
    """A group that has ended machines, in the format of DescribeScalingActivities."""

    def describe_scaling_activities(self, **_: Any) -> dict[str, Any]:
        cause = "At 2026-01-01T00:00:00Z an instance was taken out of service in response to "
        found = [
            ("Terminating EC2 instance: i-0a", cause + "a user health-check."),
            ("Terminating EC2 instance: i-0b", cause + "an EC2 health check indicating it has …"),
            ("Terminating EC2 instance: i-0c", cause + "a difference between desired and actual …"),
            ("Launching a new EC2 instance: i-0d", "… in response to a user health-check"),
            ("Launching a new EC2 instance", "Could not launch: InsufficientInstanceCapacity"),
        ]
        at = datetime.fromtimestamp(100, UTC)
        return {"Activities": [{"Description": d, "Cause": c, "StartTime": at} for d, c in found]}


def test_only_machines_that_reported_unhealthy_count_as_failed() -> None:
    """Machines that AWS or the pool ended, and failed launches, do not."""
    assert ScalingGroup(Activities(), "machines").failed() == [Failed("i-0a", 100.0)]


def test_a_missing_group_is_an_error(group: ScalingGroup) -> None:
    """It is not polled again and again. A group without activities has no failures."""
    assert group.failed() == []
    with pytest.raises(LookupError, match="no Auto Scaling group 'x'"):
        ScalingGroup(group.client, "x").num_desired()


def test_an_option_names_the_worker_pool(aws_environ: dict[str, str]) -> None:
    """An ECS service or an Auto Scaling group, not both. Metrics are logged or sent."""
    parser = build_parser()
    on_machines = parser.parse_args(["--auto-scaling-group=g", "--model-name=m", "--put-metrics"])
    workforce = workforce_of(on_machines, boto3.client)
    assert isinstance(workforce, ScalingGroup)
    assert workforce.name == "g"
    assert isinstance(emitter_of(on_machines, boto3.client), MetricSender)
    with pytest.raises(ValueError, match="--ecs-cluster"):
        workforce_of(parser.parse_args(["--ecs-service=s", "--model-name=m"]), boto3.client)
    for wrong in (
        ["--model-name=m"],
        ["--model-name=m", "--ecs-service=s", "--auto-scaling-group=g"],
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


def line(at_s: float, **values: float | list[float]) -> str:
    """A record in CloudWatch's embedded format."""
    metrics = [{"Name": name, "Unit": "Count"} for name in values]
    about = {"Namespace": "batchway", "Dimensions": [["Model"]], "Metrics": metrics}
    stamp = {"Timestamp": int(at_s * 1000), "CloudWatchMetrics": [about]}
    return json.dumps({"_aws": stamp, "Model": "m", **values})


def test_metrics_are_sent_once_a_minute_with_their_times(aws_environ: dict[str, str]) -> None:
    """With the names and dimensions of the log lines, for the same alarms."""
    client, clock = boto3.client("cloudwatch"), Clock()
    clock.now_s = now_s = datetime.now(UTC).timestamp() // 60 * 60
    send = MetricSender(client, clock)

    def sums() -> list[float]:
        found = client.get_metric_statistics(
            Namespace="batchway", MetricName="DesiredWorkers",
            Dimensions=[{"Name": "Model", "Value": "m"}], Period=60, Statistics=["Sum"],
            StartTime=now_s - 600, EndTime=now_s + 600,
        )  # fmt: skip
        return [point["Sum"] for point in sorted(found["Datapoints"], key=lambda p: p["Timestamp"])]

    send(line(now_s - 300, DesiredWorkers=2))
    assert sums() == [2.0]
    send(line(now_s - 120, DesiredWorkers=3, BacklogS=[1.0, 2.0]))
    send(line(now_s - 120, DesiredWorkers=4))
    assert sums() == [2.0]
    clock.now_s += EVERY_S
    send(line(now_s, DesiredWorkers=5))
    assert sums() == [2.0, 7.0, 5.0]
    listed = client.list_metrics(Namespace="batchway")["Metrics"]
    assert {metric["MetricName"] for metric in listed} == {"DesiredWorkers", "BacklogS"}
