"""scripts/preflight, scripts/deploy and scripts/destroy, against moto.

CloudFormation in moto knows no SAM: there the stack's resources are left out.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml  # type: ignore[import-untyped]
from botocore.stub import Stubber
from moto.core.config import default_user_config

from infra.aws import artifacts, deploy, destroy, installation, preflight
from infra.aws.installation import DeployError, Installation
from tests.aws.template import ROOT, written

# moto makes no CodeBuild projects by CloudFormation.
pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse AWS")

IMAGES = {"WorkerImageUri": "public.example/worker:1", "ServicesImageUri": "public.example/gw:1"}
FOUND = {"Url": "https://u/live", "ApiKeySecretArn": "arn:s", "HousekeeperFunctionName": "keeper"}


@pytest.fixture
def network(aws_environ: dict[str, str]) -> dict[str, str]:
    """The parameters of a VPC with private subnets in two zones, and a NAT gateway."""
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=zone)
        for n, zone in enumerate(("eu-central-1a", "eu-central-1b"))
    ]
    names = [subnet["Subnet"]["SubnetId"] for subnet in subnets]
    nat = ec2.create_nat_gateway(SubnetId=names[0], ConnectivityType="private")
    found = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    ec2.create_route(
        RouteTableId=found["RouteTables"][0]["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        NatGatewayId=nat["NatGateway"]["NatGatewayId"],
    )
    return {"VpcId": vpc, "PrivateSubnetIds": ",".join(names)}


class Session:
    """A boto3 session whose clients of some services answer what a test says: moto has no answer
    of theirs."""

    region_name = "eu-central-1"
    profile_name = "default"

    def __init__(self, *, concurrency: int = 1000, vcpus: float = 64.0) -> None:
        self._concurrency, self._vcpus = concurrency, vcpus

    def client(self, service: str, **options: Any) -> Any:
        client: Any = boto3.client(service, **options)
        stubber = Stubber(client)
        if service == "lambda":
            limits = {
                "ConcurrentExecutions": self._concurrency,
                "UnreservedConcurrentExecutions": self._concurrency,
            }
            stubber.add_response("get_account_settings", {"AccountLimit": limits})
            stubber.activate()
        if service == "service-quotas":
            stubber.add_response("get_service_quota", {"Quota": {"Value": self._vcpus}})
            stubber.activate()
        return client


def on(session: Session, tmp_path: Path, **parameters: str) -> Installation:
    return Installation(session, "batchway", parameters, tmp_path / "p.json", True)


def problems(one: Installation) -> dict[str, bool]:
    """Each problem's text, and whether it is fatal."""
    return {f.problem: f.is_fatal for f in preflight.findings(one) if f.problem}


def test_an_account_with_all_it_needs_passes(network: dict[str, str], tmp_path: Path) -> None:
    one = on(Session(), tmp_path, **network, **IMAGES, WithApiLogRole="yes", ReservedStreams="200")
    assert problems(one) == {}


def test_a_fresh_account_is_told_what_it_lacks(network: dict[str, str], tmp_path: Path) -> None:
    """No role for API Gateway's logs, ten functions at a time, no GPU, no image."""
    ecr = boto3.client("ecr")
    ecr.create_repository(repositoryName="batchway-worker")
    image = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/batchway-worker:1"
    session = Session(concurrency=10, vcpus=0.0)
    one = on(session, tmp_path, **network, WorkerImageUri=image, ReservedStreams="200")
    found = problems(one)
    assert all(found.values())
    assert len(found) == 4
    text = "\n".join(found)
    for word in (
        '"WithApiLogRole": "yes"',
        "L-B99A9384",
        "no worker can start",
        f"no image {image}",
    ):
        assert word in text
    few = problems(on(Session(concurrency=10, vcpus=8), tmp_path, **network, WithApiLogRole="yes"))
    assert list(few.values()) == [False, False]
    assert "8 vCPUs allow 2 of 8 workers" in few
    ecr.delete_repository(repositoryName="batchway-worker")


def test_subnets_without_a_way_out_or_in_one_zone_are_refused(
    aws_environ: dict[str, str], tmp_path: Path
) -> None:
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.0.0/24")["Subnet"]["SubnetId"]
    one = on(Session(), tmp_path, VpcId=vpc, PrivateSubnetIds=subnet, WithApiLogRole="yes")
    text = "\n".join(problems(one))
    assert "one zone only" in text
    assert f"{subnet} has no way out" in text
    missing = on(Session(), tmp_path, VpcId=vpc, PrivateSubnetIds="subnet-0", WithApiLogRole="yes")
    assert any("subnet-0" in text and is_fatal for text, is_fatal in problems(missing).items())


def test_a_group_needs_a_zone_that_offers_its_type(network: dict[str, str], tmp_path: Path) -> None:
    group = {"CapacityKind": "auto-scaling-group", "GpuInstanceType": "g9.none"}
    one = on(Session(), tmp_path, **network, **group, WithApiLogRole="yes")
    assert "no zone of the subnets offers g9.none" in problems(one)


def test_a_durable_cache_needs_a_node_that_can(network: dict[str, str], tmp_path: Path) -> None:
    durable = {**network, **IMAGES, "WithApiLogRole": "yes", "Durability": "durable"}
    [problem] = problems(on(Session(), tmp_path, **durable))
    assert problem.startswith("cache.t4g.small cannot be durable: take CacheNodeType cache.m7g")
    assert not problems(on(Session(), tmp_path, **durable, CacheNodeType="cache.r8g.xlarge"))


def test_parameters_are_read_from_a_file_or_asked_for(tmp_path: Path) -> None:
    """Once: the answers are kept. Unattended, a missing one is named. Unknown names are errors."""
    path = tmp_path / "p.json"
    path.write_text('{"PrivateSubnetIds": ["a", "b"], "MaxWorkers": 3}')
    parameters = installation.read_parameters(path)
    assert parameters == {"PrivateSubnetIds": "a,b", "MaxWorkers": "3"}
    with pytest.raises(DeployError, match="VpcId missing"):
        deploy.ask_for_missing(Installation(Session(), "s", parameters, path, True))
    deploy.ask_for_missing(Installation(Session(), "s", parameters, path, False), lambda _: "vpc-1")
    assert installation.read_parameters(path) == parameters | {"VpcId": "vpc-1"}
    with pytest.raises(DeployError, match="no parameter 'MaxWorker'"):
        deploy.check_names({"MaxWorker": "3"})
    with pytest.raises(DeployError, match="no file"):
        installation.read_parameters(tmp_path / "none")
    path.write_text("[]")
    with pytest.raises(DeployError, match="JSON object"):
        installation.read_parameters(path)


def test_declared_parameters_are_those_of_the_template() -> None:
    """With their defaults, as a YAML parser reads them."""
    expected = {
        name: None if "Default" not in one else str(one["Default"])
        for name, one in written()["Parameters"].items()
    }
    assert installation.declared_parameters(ROOT / "template.yaml") == expected


def test_a_release_changes_with_code_and_parameters(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = deploy.release(tmp_path, {"A": "1"})
    assert first == deploy.release(tmp_path, {"A": "1"})
    assert deploy.release(tmp_path, {"A": "2"}) != first
    (tmp_path / "a.py").write_text("2")
    assert deploy.release(tmp_path, {"A": "1"}) != first


def test_images_are_built_by_codebuild_where_none_is_named(
    aws_environ: dict[str, str], tmp_path: Path
) -> None:
    """The last commit, once per tag; a failed build ends the deployment."""
    one = on(Session(), tmp_path)
    found = artifacts.deploy_artifacts(one)
    again = artifacts.deploy_artifacts(one)
    assert again == found
    client = CodeBuild("SUCCEEDED")
    assert {"Bucket", "WorkerRegistry", "ServicesRegistry"} <= set(found)
    artifacts.run_builds(client, ["w", "s"], "bucket/source", "1", lambda _: None)
    assert client.started == ["w", "s"]
    with pytest.raises(DeployError, match="p failed: see https://log"):
        artifacts.run_builds(CodeBuild("FAILED"), ["p"], "bucket/source", "1", lambda _: None)


class CodeBuild:
    """A CodeBuild whose builds run for one poll and then end with a status."""

    def __init__(self, status: str) -> None:
        self.started: list[str] = []
        self._statuses = ["IN_PROGRESS", status]

    def start_build(self, *, projectName: str, **_: Any) -> dict[str, Any]:
        self.started.append(projectName)
        return {"build": {"id": projectName}}

    def batch_get_builds(self, *, ids: list[str]) -> dict[str, Any]:
        status, logs = self._statuses.pop(0), {"deepLink": "https://log"}
        return {"builds": [{"projectName": i, "buildStatus": status, "logs": logs} for i in ids]}


class Draining:
    """An ECS with two services, whose tasks end when they are unprotected and not wanted."""

    def __init__(self) -> None:
        self.tasks = {"batchway-worker": ["w1", "w2"], "Pool-1": ["p"]}
        self.calls: list[str] = []
        self.is_protected = {"w1", "w2"}

    def list_services(self, **_: Any) -> dict[str, Any]:
        return {"serviceArns": [f"arn:service/c/{name}" for name in self.tasks]}

    def update_service(self, *, service: str, desiredCount: int, **_: Any) -> None:
        assert desiredCount == 0
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
    names = destroy.services_of(ecs, "c", "batchway")
    assert names == ["Pool-1", "batchway-worker"]
    destroy.end_workers(ecs, "c", names, sleep=lambda _: None)
    assert ecs.calls == names
    assert not any(ecs.tasks.values())


def test_what_is_left_is_listed(aws_environ: dict[str, str], tmp_path: Path) -> None:
    s3 = boto3.client("s3")
    where: Any = {"LocationConstraint": "eu-central-1"}
    s3.create_bucket(Bucket="left-weights", CreateBucketConfiguration=where)
    one = Installation(Session(), "left", {}, tmp_path / "p.json", True)
    assert list(destroy.leftovers(one)) == ["bucket left-weights"]


def test_a_failing_housekeeper_fails_the_deployment() -> None:
    """Without the function library no job is accepted."""

    class Lambda:
        def invoke(self, **_: Any) -> dict[str, str]:
            return {"FunctionError": "Unhandled"}

    with pytest.raises(DeployError, match="keeper failed"):
        deploy.load_library(Lambda(), "keeper")


def test_the_next_steps_do_not_contain_the_key() -> None:
    text = deploy.next_steps(FOUND)
    assert "curl -N https://u/live/v1/models" in text
    assert "--secret-id arn:s" in text
    assert set(FOUND) | {"ClusterName"} <= set(written()["Outputs"])


def test_a_missing_region_and_missing_credentials_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE",
                 "AWS_REGION", "AWS_DEFAULT_REGION"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert preflight.main([]) == 1
    assert "name --region" in capsys.readouterr().err
    assert preflight.main(["--region=eu-central-1"]) == 1
    assert "aws configure" in capsys.readouterr().err
    assert preflight.main(["--profile=none"]) == 1
    assert "none" in capsys.readouterr().err


@pytest.fixture
def cloudformation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes moto take the template, with one resource in place of all."""
    from moto.cloudformation import utils

    read: Any = utils.get_stack_from_s3_url

    def shortened(*given: Any, **named: Any) -> str:
        body: str = read(*given, **named)
        # As sam writes it: without short forms of functions.
        template = yaml.safe_load(body)
        template.pop("Transform")
        template["Resources"] = {"T": {"Type": "AWS::SNS::Topic"}}
        for section in ("Conditions", "Globals", "Rules", "Metadata", "Outputs"):
            template.pop(section, None)
        return json.dumps(template)

    monkeypatch.setattr("moto.cloudformation.responses.get_stack_from_s3_url", shortened)
    monkeypatch.setitem(default_user_config, "lambda", {"use_docker": False})


@pytest.mark.campaign
@pytest.mark.skipif(not (ROOT / ".venv-sam").exists(), reason="scripts/setup-sam has not run")
@pytest.mark.usefixtures("cloudformation")
def test_a_whole_deployment_in_another_region_than_the_default(
    network: dict[str, str], aws_environ: dict[str, str], tmp_path: Path
) -> None:
    """By the scripts, with sam: validated, built, uploaded, deployed, tried, destroyed."""
    url = aws_environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")  # as moto wants it
    role = boto3.client("iam").create_role(RoleName="keeper", AssumeRolePolicyDocument="{}")
    boto3.client("lambda").create_function(
        FunctionName="keeper", Runtime="python3.13", Handler="h.h", Role=role["Role"]["Arn"],
        Code={"ZipFile": b"PK\x05\x06" + bytes(18)},
    )  # fmt: skip
    # moto sets outputs when it creates a stack, and not by a change set.
    outputs = {name: {"Value": value} for name, value in FOUND.items()}
    first = {"Resources": {"T": {"Type": "AWS::SNS::Topic"}}, "Outputs": outputs}
    boto3.client("cloudformation").create_stack(
        StackName="batchway", TemplateBody=json.dumps(first)
    )
    machines = {"CapacityKind": "own-machines", "MachineGroupName": "m", "WithApiLogRole": "yes"}
    path = tmp_path / "p.json"
    path.write_text(json.dumps(network | IMAGES | machines))
    environ = {**os.environ, "AWS_ENDPOINT_URL": url}
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        environ[name] = "us-west-2"
    options = ["--yes", "--region=eu-central-1", f"--parameters={path}"]

    deployed = subprocess.run(
        ["scripts/deploy", *options], cwd=ROOT, env=environ, capture_output=True, text=True
    )

    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    assert "curl -N https://u/live/v1/models" in deployed.stdout
    stacks = boto3.client("cloudformation").describe_stacks()["Stacks"]
    [stack] = [stack for stack in stacks if stack["StackName"] == "batchway"]
    given = {one["ParameterKey"]: one["ParameterValue"] for one in stack["Parameters"]}
    assert given["VpcId"] == network["VpcId"]
    assert len(given["Release"]) == 64
    destroyed = subprocess.run(
        ["scripts/destroy", *options], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert destroyed.returncode == 0, destroyed.stdout + destroyed.stderr
    assert "stack batchway-artifacts" in destroyed.stdout
