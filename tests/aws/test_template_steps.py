"""A deployment of template.yaml step by step: what comes first, what an update keeps, what a failed
one leaves."""

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.aws.fake_ecs import FakeEcs
from tests.aws.template import as_list, functions, of_type, transformed, written

WORKERS = {"Cluster": "c", "Service": "s", "Task": "arn:1"}
LIBRARY = {"Function": "keeper", "Version": "1"}


class Answers(ModuleType):
    """Stands for the module that Lambda has beside inline code, and keeps what is answered."""

    SUCCESS, FAILED = "SUCCESS", "FAILED"

    def __init__(self) -> None:
        super().__init__("cfnresponse")
        self.last: Any = None

    def send(
        self, _event: Any, _context: Any, status: str, data: Any, name: str, reason: str | None
    ) -> None:
        self.last = SimpleNamespace(status=status, data=data, name=name, reason=reason or "")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    module = Answers()
    monkeypatch.setitem(sys.modules, "cfnresponse", module)
    return module


def step(answers: Answers, kind: str, given: dict[str, str], name: str | None = None) -> Any:
    """Runs the code of StepFunction as CloudFormation does; returns its answer."""
    code = of_type("AWS::Lambda::Function")["StepFunction"]["Code"]["ZipFile"]
    assert len(code.encode()) < 4096  # of inline code
    inline: dict[str, Any] = {}
    exec(code, inline)
    inline["time"] = SimpleNamespace(sleep=lambda _: None)
    event = {"RequestType": kind, "ResourceProperties": {"ServiceToken": "t", **given}}
    inline["handler"](event | ({"PhysicalResourceId": name} if name else {}), None)
    return answers.last


class Service(FakeEcs):
    """A service that may not be there yet."""

    is_there = True

    def describe_services(self, **given: Any) -> dict[str, Any]:
        return {"services": [{"status": "ACTIVE" if self.is_there else "INACTIVE",
                              "desiredCount": self.num_desired}]}  # fmt: skip


def test_the_first_deployment_starts_no_worker_and_later_ones_keep_their_number(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a stack is complete without a free GPU, and an update leaves to the pool what it sets."""
    ecs = Service(random.Random(0), num_desired=5)
    monkeypatch.setattr(boto3, "client", lambda _: ecs)
    ecs.is_there = False
    made = step(answers, "Create", WORKERS)
    ecs.is_there = True
    kept = step(answers, "Update", {**WORKERS, "Task": "arn:2"}, made.name)
    assert [made.data, kept.data] == [{"DesiredCount": 0}, {"DesiredCount": 5}]
    assert made.name == kept.name  # otherwise the old one is deleted
    service = of_type("AWS::ECS::Service")["WorkerService"]
    count = of_type("Custom::WorkerCount")["WorkerCount"]
    assert service["DesiredCount"] == {"Fn::GetAtt": ["WorkerCount", "DesiredCount"]}
    assert count["Service"] == service["ServiceName"]
    assert count["Task"] == service["TaskDefinition"]  # it is read again before a task changes


class Keeper:
    """A Lambda on which the right to call it is known at the third try."""

    def __init__(self, *, fails: bool = False, tries: int = 3) -> None:
        self._answer = {"FunctionError": "Unhandled"} if fails else {}
        self._left = tries

    def invoke(self, *, FunctionName: str) -> dict[str, str]:
        self._left -= 1
        if self._left:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "Invoke")
        return self._answer


@pytest.mark.parametrize(
    ("keeper", "status"),
    [
        (Keeper(), "SUCCESS"),
        (Keeper(fails=True), "FAILED"),
        (Keeper(tries=100), "FAILED"),
    ],
)
def test_the_library_is_loaded_before_what_calls_it(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, keeper: Keeper, status: str
) -> None:
    """By each new version of the housekeeper. A deployment whose housekeeper fails ends there."""
    monkeypatch.setattr(boto3, "client", lambda _: keeper)
    assert step(answers, "Update", LIBRARY, "n").status == status
    assert before("FlowsService", "Library")
    assert not before("HousekeeperFunction", "Library")
    for part in ("Front", "Pool"):  # begin when all of that is there
        given = written()["Resources"][part]["Properties"]["Parameters"]
        assert given["Cluster"] == {"Fn::GetAtt": ["Services", "Outputs.Cluster"]}
    assert set(functions()) | set(of_type("AWS::ECS::Service")) == {
        "HousekeeperFunction", "OperatorFunction", "FlowsService", "ApiFunction", "StreamFunction",
        "StreamInstancesFunction", "CallbacksService", "WorkerService", "PoolService",
    }  # fmt: skip
    [version] = [
        name
        for name, one in of_type("AWS::Lambda::Version").items()
        if one["FunctionName"] == {"Ref": "HousekeeperFunction"}
    ]
    assert of_type("Custom::Library")["Library"]["Version"] == {"Ref": version}


def before(part: str, other: str) -> bool:
    """Whether a resource waits for another, by DependsOn."""
    depends = as_list(transformed()["Resources"][part].get("DependsOn", []))
    return other in depends or any(before(one, other) for one in depends)


def test_a_first_deployment_that_fails_leaves_no_bucket() -> None:
    resources = transformed()["Resources"].items()
    kept = {name: r["DeletionPolicy"] for name, r in resources if r["Type"] == "AWS::S3::Bucket"}
    assert set(kept.values()) == {"RetainExceptOnCreate"}
    assert len(kept) == 2


def test_rolling_needs_no_gpu_beyond_the_most_workers() -> None:
    """New workers take the places of old ones, wherever they run."""
    rolling = of_type("AWS::ECS::Service")["WorkerService"]["DeploymentConfiguration"]
    assert rolling["MaximumPercent"] == 100
    assert rolling["MinimumHealthyPercent"] < 100


def test_the_cache_keeps_a_week_of_snapshots_and_restarts_when_told() -> None:
    cache = of_type("AWS::ElastiCache::ReplicationGroup")["Cache"]
    assert cache["SnapshotRetentionLimit"] == {"Ref": "CacheSnapshotDays"}
    assert written()["Parameters"]["CacheSnapshotDays"]["Default"] >= 7
    assert cache["PreferredMaintenanceWindow"] == {"Ref": "CacheMaintenanceWindow"}
    # AWS refuses windows that overlap.
    assert cache["SnapshotWindow"].split("-")[1] <= "02:00"
    assert written()["Parameters"]["CacheMaintenanceWindow"]["Default"] == "sun:02:00-sun:03:00"
