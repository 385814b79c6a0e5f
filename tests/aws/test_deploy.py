"""scripts/images and scripts/destroy, against moto."""

import contextlib
import json
import uuid
import zipfile
from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.aws import destroy, images, parameters
from infra.aws.installation import Installation
from infra.aws.parameters import DeployError
from tests.aws.template import ROOT
from tests.aws.test_preflight import IMAGES, Network, Session

# moto makes no CodeBuild projects by CloudFormation.
pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse AWS")

REGISTRY = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/batchway-artifacts"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "POLL_S", 0.0)
    monkeypatch.setattr(destroy, "POLL_S", 0.0)


class CodeBuild:
    """A CodeBuild whose builds run for one poll and then end with a status."""

    def __init__(self, status: str = "SUCCEEDED") -> None:
        self.started: list[dict[str, Any]] = []
        self._statuses = ["IN_PROGRESS", status]

    def start_build(self, **given: Any) -> dict[str, Any]:
        self.started.append(given)
        return {"build": {"id": given["environmentVariablesOverride"][0]["value"]}}

    def batch_get_builds(self, *, ids: list[str]) -> dict[str, Any]:
        status, logs = self._statuses.pop(0), {"deepLink": "https://log"}
        return {"builds": [{"id": i, "buildStatus": status, "logs": logs} for i in ids]}


class BuildingSession(Session):
    def __init__(self, codebuild: CodeBuild) -> None:
        super().__init__()
        self._codebuild = codebuild

    def client(self, service: str, **options: Any) -> Any:
        return self._codebuild if service == "codebuild" else super().client(service, **options)


@pytest.fixture
def bucket(aws_environ: dict[str, str]) -> str:
    where: Any = {"LocationConstraint": "eu-central-1"}
    name = f"sources-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration=where)
    return name


def test_codebuild_gets_the_files_of_this_folder(bucket: str, tmp_path: Path) -> None:
    """Those that the functions are made of, committed or not; each image on a machine of its kind,
    with its target."""
    codebuild = CodeBuild()
    one = Installation(BuildingSession(codebuild), "batchway", {})
    tags = set(parameters.tags({}).values()) | {
        parameters.tags({"WorkerEngine": "own"})["WorkerImageUri"]
    }
    images.run_builds(one, bucket, "project", tags)

    by_target = {}
    for build in codebuild.started:
        assert build["projectName"] == "project"
        variables = {v["name"]: v["value"] for v in build["environmentVariablesOverride"]}
        by_target[variables["DOCKERFILE"], variables["TARGET"]] = build
    assert by_target.keys() == {
        ("Dockerfile.worker", "vllm"), ("Dockerfile.worker", "own"), ("Dockerfile.gateway", ""),
    }  # fmt: skip
    assert by_target["Dockerfile.gateway", ""]["environmentTypeOverride"] == "ARM_CONTAINER"
    for target in ("vllm", "own"):
        assert f"AS {target}\n" in (ROOT / "Dockerfile.worker").read_text()
        assert "environmentTypeOverride" not in by_target["Dockerfile.worker", target]
    name, _, key = codebuild.started[0]["sourceLocationOverride"].partition("/")
    boto3.client("s3").download_file(name, key, str(tmp_path / "source.zip"))
    with zipfile.ZipFile(tmp_path / "source.zip") as archive:
        assert archive.read("infra/aws/images.py") == (ROOT / "infra/aws/images.py").read_bytes()
        assert {"Dockerfile.worker", "locks/worker.txt"} <= set(archive.namelist())
        assert not any("__pycache__" in name for name in archive.namelist())


def test_a_failed_build_names_its_log(bucket: str) -> None:
    one = Installation(BuildingSession(CodeBuild("FAILED")), "batchway", {})
    with pytest.raises(DeployError, match="services-1 failed: see https://log"):
        images.run_builds(one, bucket, "project", {"services-1"})


@pytest.fixture
def artifacts(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """artifacts.yaml, as sam would deploy it."""
    monkeypatch.setenv("PARAMETERS", str(tmp_path / "p.json"))

    def deploy(one: Installation, *arguments: str) -> None:
        name = arguments[arguments.index("--stack-name") + 1]
        assert "--config-env=none" in arguments  # or it would get the parameters of template.yaml
        if one.described(name) is None:
            body = Path(arguments[arguments.index("--template-file") + 1]).read_text()
            one.client("cloudformation").create_stack(StackName=name, TemplateBody=body)

    monkeypatch.setattr(Installation, "sam", deploy)
    ecr = boto3.client("ecr")
    yield ecr
    with contextlib.suppress(ecr.exceptions.RepositoryNotFoundException):
        present = ecr.list_images(repositoryName="batchway-artifacts")["imageIds"]
        if present:
            ecr.batch_delete_image(repositoryName="batchway-artifacts", imageIds=present)
    boto3.client("cloudformation").delete_stack(StackName="batchway-artifacts")


@pytest.mark.campaign
def test_images_are_built_where_none_is_named_and_noted(
    artifacts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the preflight, once for the same files; one's own are left alone."""
    network = Network()
    network.route(NatGatewayId=network.nat())
    own = network.parameters | {"WithApiLogRole": "yes"}

    def built(**values: str) -> list[str]:
        codebuild = CodeBuild()
        one = Installation(BuildingSession(codebuild), "batchway", own | values)
        assert images.build_images(one) == 0
        return [build["environmentVariablesOverride"][0]["value"] for build in codebuild.started]

    tags = parameters.tags({})
    assert sorted(built()) == sorted(tags.values())
    noted = json.loads(parameters.path().read_text())
    assert noted == own | {name: f"{REGISTRY}:{tag}" for name, tag in tags.items()}
    artifacts.put_image(
        repositoryName="batchway-artifacts",
        imageTag=tags["WorkerImageUri"],
        imageManifest="{}",
        imageManifestMediaType="application/vnd.oci.image.manifest.v1+json",
    )
    assert built() == [tags["ServicesImageUri"]]
    assert built(ServicesImageUri=IMAGES["ServicesImageUri"]) == []
    assert json.loads(parameters.path().read_text())["ServicesImageUri"] == "public.example/gw:1"
    assert built(**IMAGES) == []


def test_nothing_is_built_before_the_preflight_passes(
    artifacts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Installation(BuildingSession(CodeBuild()), "batchway", {"WithCallbacks": "true"})
    with pytest.raises(DeployError, match="nothing was built"):
        images.build_images(one)
    assert one.described("batchway-artifacts") is None
    assert "FAIL  WithCallbacks: must be one of yes, no" in capsys.readouterr().out


class Draining:
    """An ECS with two services, whose tasks end when they are unprotected and not wanted."""

    def __init__(self) -> None:
        self.tasks = {"batchway-worker": ["w1", "w2"], "Pool-1": ["p"]}
        self.calls: list[str] = []
        self.is_protected = {"w1", "w2"}

    def update_service(self, *, cluster: str, service: str, desiredCount: int) -> None:
        assert (cluster, desiredCount) == ("c", 0)
        self.calls.append(service)

    def update_task_protection(
        self, *, tasks: list[str], protectionEnabled: bool, **_: Any
    ) -> None:
        assert not protectionEnabled
        self.is_protected -= set(tasks)

    def list_tasks(self, *, serviceName: str, **_: Any) -> dict[str, Any]:
        arns = list(self.tasks[serviceName])
        self.tasks[serviceName] = [arn for arn in arns if arn in self.is_protected]
        return {"taskArns": arns}


def test_destroying_ends_the_pool_before_the_workers() -> None:
    """It would start them again. Protected tasks end too."""
    ecs = Draining()
    names = ["batchway-worker", "Pool-1"]
    arns = [f"arn:aws:ecs:eu-central-1:123456789012:service/c/{name}" for name in names]
    destroy.end_workers(ecs, arns)
    assert ecs.calls == ["Pool-1", "batchway-worker"]
    assert not any(ecs.tasks.values())


def installed(name: str, nested: str) -> None:
    """A stack with a retained and a deleted bucket, a cache, and a nested stack with a bucket."""
    kept = {"Type": "AWS::S3::Bucket", "DeletionPolicy": "RetainExceptOnCreate"}
    body = {
        "Resources": {
            "Weights": kept | {"Properties": {"BucketName": f"{name}-weights"}},
            "Scratch": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": f"{name}-scratch"}},
            "Data": {"Type": "AWS::CloudFormation::Stack", "Properties": {"TemplateURL": nested}},
        }
    }
    boto3.client("cloudformation").create_stack(StackName=name, TemplateBody=json.dumps(body))


def test_what_is_left_is_that_of_this_installation_alone(
    aws_environ: dict[str, str], bucket: str
) -> None:
    """Not that of another one whose name begins alike: whoever deletes what is listed would take
    its weights. Both have nested stacks; names of theirs are not known before."""
    body = """
Resources:
  Payloads:
    Type: AWS::S3::Bucket
    DeletionPolicy: Retain
    Properties: {BucketName: !Sub "${AWS::StackName}-payloads"}
"""
    boto3.client("s3").put_object(Bucket=bucket, Key="nested.yaml", Body=body)
    url = f"https://{bucket}.s3.amazonaws.com/nested.yaml"
    for name in ("batchway", "batchway-prod", "my-batchway"):
        installed(name, url)
    elasticache = boto3.client("elasticache")
    for group in ("batchway-cache", "batchway-prod-cache"):
        elasticache.create_replication_group(
            ReplicationGroupId=group, ReplicationGroupDescription=group
        )
    one = Installation(Session(), "batchway", {})
    found = list(destroy.resources(one.client("cloudformation"), "batchway"))
    kinds = {resource["LogicalResourceId"]: policy for resource, policy in found}
    assert kinds["Payloads"] == "Retain"

    lines = list(destroy.leftovers(one, found))

    assert "AWS::S3::Bucket batchway-weights" in lines
    assert len(lines) == 2
    assert all("prod" not in line and "my-" not in line for line in lines), lines
    images_stack = {"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}
    cloudformation = boto3.client("cloudformation")
    for name in ("batchway-artifacts", "batchway-prod-artifacts"):
        cloudformation.create_stack(StackName=name, TemplateBody=json.dumps(images_stack))
    assert list(destroy.leftovers(one, found)) == ["stack batchway-artifacts", *lines]
    for stack in cloudformation.describe_stacks()["Stacks"]:
        cloudformation.delete_stack(StackName=stack["StackName"])


def test_the_stack_of_the_data_stays_and_is_named(aws_environ: dict[str, str], bucket: str) -> None:
    """What is in it is not listed by itself: it is in use until that stack is deleted."""
    body = json.dumps({"Resources": {"Cache": {"Type": "AWS::SNS::Topic"}}})
    boto3.client("s3").put_object(Bucket=bucket, Key="data.yaml", Body=body)
    url = f"https://{bucket}.s3.amazonaws.com/data.yaml"
    data = {"Type": "AWS::CloudFormation::Stack", "DeletionPolicy": "RetainExceptOnCreate"}
    template = {"Resources": {"Data": data | {"Properties": {"TemplateURL": url}}}}
    client = boto3.client("cloudformation")
    client.create_stack(StackName="whole", TemplateBody=json.dumps(template))
    [(nested, _)] = found = list(destroy.resources(client, "whole"))
    name = client.describe_stacks(StackName=nested["PhysicalResourceId"])["Stacks"][0]["StackName"]
    [line] = destroy.leftovers(Installation(Session(), "whole", {}), found)
    assert line == f"stack {name}, with all data: scripts/destroy --stack-name {name}"
    client.delete_stack(StackName="whole")


def test_only_the_last_snapshots_of_this_cache_are_listed(aws_environ: dict[str, str]) -> None:
    class Cache:
        def describe_snapshots(self) -> dict[str, Any]:
            groups = ("batchway-c", "batchway-c2", "prod-batchway-c", "", None)
            named = [
                {"SnapshotName": f"s{n}", "ReplicationGroupId": g} for n, g in enumerate(groups)
            ]
            return {"Snapshots": [*named, {"SnapshotName": "other"}]}

    class CacheSession(Session):
        def client(self, service: str, **options: Any) -> Any:
            return Cache() if service == "elasticache" else super().client(service, **options)

    found = [({"PhysicalResourceId": "batchway-c", "ResourceType": "T"}, "Snapshot")]
    one = Installation(CacheSession(), "none", {})
    assert list(destroy.leftovers(one, found)) == ["snapshot s0"]


def test_a_stack_that_is_not_there_or_protected_is_left_alone(
    aws_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Installation, "sam", lambda *_: pytest.fail("deleted"))
    with pytest.raises(DeployError, match="no stack none in eu-central-1"):
        destroy.destroy(Installation(Session(), "none", {}, True))
    one = Installation(Session(), "guarded", {})
    one.client("cloudformation").create_stack(
        StackName="guarded", TemplateBody='{"Resources": {"T": {"Type": "AWS::SNS::Topic"}}}'
    )
    with pytest.raises(DeployError, match="nothing was deleted"):
        destroy.destroy(one, ask=lambda _: "")
    guarded = {"EnableTerminationProtection": True}
    monkeypatch.setattr(Installation, "described", lambda *_: guarded)
    with pytest.raises(DeployError, match="--no-enable-termination-protection"):
        destroy.destroy(one)
