"""scripts/preflight, against moto: what an account lacks, before anything is built."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.stub import Stubber

from infra.aws import installation, preflight
from infra.aws.installation import Installation, explained
from infra.aws.parameters import DeployError
from tests.aws.template import written

LISTS = ("describe_instance_types", "describe_instance_type_offerings")
IMAGES = {"WorkerImageUri": "public.example/worker:1", "ServicesImageUri": "public.example/gw:1"}
REGION = "eu-central-1"
ENDPOINTS = (
    "ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "s3", "secretsmanager",
)  # fmt: skip
"""What the stack calls from the VPC; metrics are lines of its logs."""


class Listing:
    """Pages of what AWS offers, which are read once for each question."""

    def __init__(self, paginator: Any) -> None:
        self._read = functools.cache(lambda asked: [*paginator.paginate(**json.loads(asked))])

    def paginate(self, **asked: Any) -> list[Any]:
        pages: list[Any] = self._read(json.dumps(asked))
        return pages


@functools.cache
def client_of(service: str, **options: Any) -> Any:
    """To make one takes a tenth of a second, and as long what lists the types of machines."""
    client: Any = boto3.client(service, **options)
    if service == "ec2":
        make = client.get_paginator
        listings = {name: Listing(make(name)) for name in LISTS}
        client.get_paginator = lambda name: listings[name] if name in LISTS else make(name)
    return client


class Network:
    """A VPC with a private subnet in each of two zones."""

    def __init__(self, region: str = REGION) -> None:
        self.ec2: Any = client_of("ec2", region_name=region)
        self.vpc = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnets = [
            self.ec2.create_subnet(
                VpcId=self.vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{region}{zone}"
            )["Subnet"]["SubnetId"]
            for n, zone in enumerate("ab")
        ]
        own = [{"Name": "vpc-id", "Values": [self.vpc]}]
        [self.table] = self.ec2.describe_route_tables(Filters=own)["RouteTables"]

    def route(self, *to: str, **through: str) -> None:
        for block in to or ("0.0.0.0/0",):
            self.ec2.create_route(
                RouteTableId=self.table["RouteTableId"], DestinationCidrBlock=block, **through
            )

    def nat(self) -> str:
        made = self.ec2.create_nat_gateway(SubnetId=self.subnets[0], ConnectivityType="private")
        return str(made["NatGateway"]["NatGatewayId"])

    def vpn(self) -> str:
        made = self.ec2.create_vpn_gateway(Type="ipsec.1")["VpnGateway"]["VpnGatewayId"]
        self.ec2.attach_vpn_gateway(VpcId=self.vpc, VpnGatewayId=made)
        return str(made)

    def internet(self) -> str:
        made = self.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        self.ec2.attach_internet_gateway(VpcId=self.vpc, InternetGatewayId=made)
        return str(made)

    def transit(self) -> str:
        return str(self.ec2.create_transit_gateway()["TransitGateway"]["TransitGatewayId"])

    def machine(self) -> str:
        made = self.ec2.create_network_interface(SubnetId=self.subnets[0])
        return str(made["NetworkInterface"]["NetworkInterfaceId"])

    def endpoints(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.ec2.create_vpc_endpoint(
                VpcId=self.vpc, ServiceName=f"com.amazonaws.{REGION}.{name}",
                VpcEndpointType="Gateway" if name == "s3" else "Interface",
            )  # fmt: skip

    @property
    def parameters(self) -> dict[str, str]:
        return {
            "VpcId": self.vpc,
            "PrivateSubnetIds": ",".join(self.subnets),
            "PrivateRouteTableIds": self.table["RouteTableId"],
        }


@pytest.fixture
def network(aws_environ: dict[str, str]) -> Network:
    return Network()


@pytest.fixture
def parameters(network: Network) -> dict[str, str]:
    """What a deployment needs, with a NAT gateway."""
    network.route(NatGatewayId=network.nat())
    return network.parameters | IMAGES | {"WithApiLogRole": "yes"}


class Session:
    """A boto3 session whose clients of some services answer what a test says: moto has no answer
    of theirs."""

    profile_name = "default"

    def __init__(
        self,
        quotas: Mapping[str, float] | None = None,
        *,
        concurrency: int = 1000,
        region: str = REGION,
    ) -> None:
        self.region_name, self._concurrency = region, concurrency
        self._quotas = quotas or {}

    def client(self, service: str, **options: Any) -> Any:
        make = boto3.client if service == "lambda" else client_of  # that one is changed below
        client: Any = make(service, **{"region_name": self.region_name} | options)
        if service == "lambda":
            stubber = Stubber(client)
            limits = {
                "ConcurrentExecutions": self._concurrency,
                "UnreservedConcurrentExecutions": self._concurrency,
            }
            stubber.add_response("get_account_settings", {"AccountLimit": limits})
            stubber.activate()
        return self if service == "service-quotas" else client

    def get_service_quota(self, *, ServiceCode: str, QuotaCode: str) -> dict[str, Any]:
        default = {"ec2": 768.0, "codebuild": 1.0}[ServiceCode]
        return {"Quota": {"Value": self._quotas.get(QuotaCode, default)}}


def problems(session: Session, **values: str) -> dict[str, bool]:
    """Each problem's text, and whether it is fatal."""
    one = Installation(session, "batchway", values)
    return {f.problem: f.is_fatal for f in preflight.findings(one) if f.problem}


def test_an_account_with_all_it_needs_passes(parameters: dict[str, str]) -> None:
    assert problems(Session(), **parameters, ReservedStreams="200") == {}


def test_a_fresh_account_is_told_what_it_lacks(parameters: dict[str, str]) -> None:
    """No role for API Gateway's logs, ten functions at a time, no GPU, no image, no build."""
    boto3.client("ecr").create_repository(repositoryName="batchway-worker")
    lacking = network_only(parameters) | {
        "WorkerImageUri": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/batchway-worker:1"
    }
    quotas = {"L-DB2E81BA": 0.0, "L-5ED1D25B": 0.0, "L-4DDC4A99": 0.0}
    found = problems(Session(quotas, concurrency=10), **lacking, ReservedStreams="200")
    assert all(found.values())
    text = "\n".join(found)
    for word in (
        '"WithApiLogRole": "yes"', "ReservedStreams to 0", "a worker on g6.xlarge needs 4: ask for",
        "check the name and --region", "is 0: ask for 1, or build and push ServicesImageUri",
    ):  # fmt: skip
        assert word in text
    assert len(found) == 5
    few = problems(Session({"L-DB2E81BA": 8.0}, concurrency=10), **parameters)
    assert list(few.values()) == [False, False]
    assert "8 vCPUs allow 2 of 8 workers" in few
    boto3.client("ecr").delete_repository(repositoryName="batchway-worker")


def network_only(parameters: dict[str, str]) -> dict[str, str]:
    names = ("VpcId", "PrivateSubnetIds", "PrivateRouteTableIds")
    return {name: parameters[name] for name in names}


def test_images_that_are_not_named_need_a_build_of_their_kind(parameters: dict[str, str]) -> None:
    """A fresh account may build none."""
    unnamed = network_only(parameters) | {"WithApiLogRole": "yes"}
    assert problems(Session(), **unnamed) == {}
    for code, name in (("L-4DDC4A99", "WorkerImageUri"), ("L-5ED1D25B", "ServicesImageUri")):
        [problem] = problems(Session({code: 0.0}), **unnamed)
        assert name in problem


WAYS: dict[str, tuple[Callable[[Network], object], str]] = {
    "a NAT gateway": (lambda n: n.route(NatGatewayId=n.nat()), ""),
    "a transit gateway": (lambda n: n.route(TransitGatewayId=n.transit()), ""),
    "a VPN": (lambda n: n.route(GatewayId=n.vpn()), ""),
    "a machine": (lambda n: n.route(NetworkInterfaceId=n.machine()), ""),
    "a VPN by halves": (
        lambda n: n.route("0.0.0.0/1", "128.0.0.0/1", GatewayId=n.vpn()), "",
    ),
    "half of a VPN": (lambda n: n.route("0.0.0.0/1", GatewayId=n.vpn()), "has no way to AWS"),
    "an internet gateway": (lambda n: n.route(GatewayId=n.internet()), "has no way to AWS"),
    "nothing": (lambda n: None, "has no way to AWS"),
    "a VPN to an office": (
        lambda n: n.route("192.168.0.0/16", GatewayId=n.vpn()), "has no way to AWS",
    ),
    "endpoints": (lambda n: n.endpoints(ENDPOINTS), "callbacks reach this VPC"),
    "endpoints but S3's, which the stack makes": (
        lambda n: n.endpoints(tuple({*ENDPOINTS} - {"s3"})), "callbacks reach this VPC",
    ),
    "endpoints but one": (lambda n: n.endpoints(ENDPOINTS[:-1]), "endpoints for secretsmanager"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_subnet_needs_some_way_to_aws(network: Network, way: str) -> None:
    """Not only a NAT gateway: a private VPC has endpoints, one behind a VPN its route."""
    make, expected = WAYS[way]
    make(network)
    found = problems(Session(), **network.parameters, **IMAGES, WithApiLogRole="yes")
    assert len(found) == bool(expected)
    for problem, is_fatal in found.items():
        assert expected in problem
        assert is_fatal == ("callbacks" not in problem)


def test_a_vpc_without_an_endpoint_of_s3_is_told_of_it(network: Network) -> None:
    """As a note, with the route tables to name. One of its own, or of the stack, is enough."""
    network.route(NatGatewayId=network.nat())
    given = network.parameters | IMAGES | {"WithApiLogRole": "yes"}
    assert problems(Session(), **given) == {}
    table = given.pop("PrivateRouteTableIds")
    [(problem, is_fatal)] = problems(Session(), **given).items()
    assert f"set PrivateRouteTableIds to {table}" in problem
    assert not is_fatal
    network.endpoints(("s3",))
    assert problems(Session(), **given) == {}


def test_a_subnet_that_is_not_there_or_alone_is_named(network: Network) -> None:
    network.route(NatGatewayId=network.nat())
    given = network.parameters | IMAGES | {"WithApiLogRole": "yes"}
    [problem] = problems(Session(), **given | {"PrivateSubnetIds": network.subnets[0]})
    assert "one zone only" in problem
    other = Network().vpc
    foreign = f"{network.subnets[0]} is not in VpcId {other}"
    assert problems(Session(), **given | {"VpcId": other})[foreign]
    found = problems(Session(), **given | {"PrivateSubnetIds": "subnet-0"})
    assert found
    assert all("subnet-0" in text and is_fatal for text, is_fatal in found.items())


@pytest.mark.parametrize(
    ("gpu", "region"),
    [
        *((gpu, REGION) for gpu in ("t4", "a10g", "l4", "l40s", "a100", "h100")),
        ("h100", "us-east-1"),
    ],
)
def test_a_gpu_is_one_that_the_zones_offer_and_the_quota_holds(
    aws_environ: dict[str, str], gpu: str, region: str
) -> None:
    """A managed worker takes a machine with one GPU: none has one A100, and an H100's has 16
    vCPUs. Held against moto's copies of AWS's lists."""
    network = Network(region)
    network.route(NatGatewayId=network.nat())
    by_name = {
        "t4": "g4dn.xlarge", "a10g": "g5.xlarge", "l4": "g6.xlarge", "l40s": "g6e.xlarge",
        "h100": "p5.4xlarge",
    }  # fmt: skip
    zones = [{"Name": "location", "Values": [f"{region}a", f"{region}b"]}]
    offers = network.ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=zones
    )["InstanceTypeOfferings"]
    is_offered = by_name.get(gpu) in {offer["InstanceType"] for offer in offers}
    given = network.parameters | IMAGES | {"WithApiLogRole": "yes", "GpuName": gpu}

    def refused(allowed: float) -> list[str]:
        session = Session({"L-DB2E81BA": allowed, "L-417A185B": allowed}, region=region)
        return [text for text, is_fatal in problems(session, **given).items() if is_fatal]

    if not is_offered:
        [problem] = refused(768)
        assert f"no zone of the subnets offers {gpu} with 1 GPU" in problem
        return
    needed = 16 if gpu == "h100" else 4
    assert refused(needed) == []
    [problem] = refused(needed - 1)
    assert f"a worker on {by_name[gpu]} needs {needed}" in problem


def test_several_gpus_of_a_managed_worker_are_those_of_one_machine(
    parameters: dict[str, str],
) -> None:
    """One A100 is in no machine, eight are in one with 96 vCPUs."""
    eight = {"GpuName": "a100", "WorkerGpus": "8"}
    assert not any(problems(Session(), **parameters, **eight).values())
    [problem] = problems(Session({"L-417A185B": 95.0}), **parameters, **eight)
    assert "a worker on p4d.24xlarge needs 96" in problem


def test_a_durable_cache_needs_a_node_that_can(parameters: dict[str, str]) -> None:
    durable = parameters | {"Durability": "durable", "CacheNodeType": "cache.t4g.medium"}
    [problem] = problems(Session(), **durable)
    assert problem.startswith("cache.t4g.medium cannot be durable: take CacheNodeType cache.m7g")
    assert not problems(Session(), **durable | {"CacheNodeType": "cache.r8g.xlarge"})


def test_a_value_that_the_template_refuses_is_a_problem(parameters: dict[str, str]) -> None:
    """Beside what AWS says, and whatever it is."""
    wrong = {"WithCallbacks": "true", "GpuName": "b9000", "MaxWorkers": "many", "Xyz": "1"}
    found = problems(Session({"L-DB2E81BA": 0.0}), **parameters, **wrong)
    assert all(found.values())
    for text in ("it is 'true'", "it is 'b9000'", "it is 'many'", "no parameter of template.yaml"):
        assert any(text in problem for problem in found), text
    assert any("a worker on g6.xlarge needs 4" in problem for problem in found)
    assert not any("ImageUri" in problem for problem in found)


def errors_of_boto() -> list[Exception]:
    """One of each class, with whatever its message names."""
    classes: list[type[Any]] = [botocore.exceptions.BotoCoreError]
    for kind in classes:
        classes += kind.__subclasses__()
    found: list[Exception] = []
    for kind in dict.fromkeys(classes):
        named = {name for name in inspect.signature(kind).parameters if name != "kwargs"}
        if "kwargs" in inspect.signature(kind).parameters:
            named |= {name for _, name, _, _ in Formatter().parse(kind.fmt) if name}
        found.append(kind(**{name: {} if name == "last_response" else "x" for name in named}))
    return found


CODES = {
    "AccessDenied": "policy", "AccessDeniedException": "policy", "UnauthorizedOperation": "policy",
    "AuthorizationError": "policy", "ExpiredToken": "aws sso login",
    "ExpiredTokenException": "aws sso login", "InvalidClientTokenId": "aws sso login",
    "UnrecognizedClientException": "aws sso login", "AuthFailure": "aws sso login",
    "SignatureDoesNotMatch": "clock", "RequestExpired": "clock", "OptInRequired": "--region",
    "Throttling": "wait", "TooManyRequestsException": "wait", "RequestLimitExceeded": "wait",
    "AccountLimitExceededException": "Service Quotas", "LimitExceeded": "Service Quotas",
    "ServiceQuotaExceededException": "Service Quotas", "InternalFailure": "try again",
    "ServiceUnavailable": "try again", "503": "try again", "403": "policy", "404": "check the name",
    "NoSuchBucket": "check the name", "RepositoryNotFoundException": "check the name",
    "InvalidSubnetID.NotFound": "check the name", "ValidationError": "correct it", "": "correct it",
}  # fmt: skip


def client_error(code: str, message: str) -> Exception:
    answer: Any = {"Error": {"Code": code, "Message": message}}
    made: Exception = botocore.exceptions.ClientError(answer, "DescribeThings")
    return made


@pytest.mark.parametrize("code", CODES)
def test_each_error_of_aws_is_a_sentence_with_a_remedy(code: str) -> None:
    for message in ("It failed.", "two\nlines:\n  here", "", "x" * 2000):
        said = explained(client_error(code, message))
        assert CODES[code] in said
        assert said.endswith(".")
        assert "\n" not in said


def test_no_error_of_boto_is_a_traceback(
    aws_environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each class that boto raises, of each script: one line, and status 1."""
    monkeypatch.setattr(boto3.session, "Session", functools.cache(boto3.session.Session))
    kinds = errors_of_boto()
    assert len(kinds) > 60
    kinds += [
        boto3.exceptions.S3UploadFailedError("Failed"), DeployError("no"), OSError("full"),
        client_error("ValidationError", "Stack with id x does not exist"),
    ]  # fmt: skip
    for error in kinds:

        def failing(_: Installation, error: Exception = error) -> int:
            raise error

        assert installation.run_script(failing, [f"--region={REGION}"]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
    credentials = botocore.exceptions.NoCredentialsError()
    assert "aws sso login" in explained(credentials)
    unreachable = botocore.exceptions.EndpointConnectionError(endpoint_url="https://e")
    assert "check the network" in explained(unreachable)


def test_a_check_that_aws_does_not_answer_is_a_note(parameters: dict[str, str]) -> None:
    """It may be a right that the deployment itself does not need."""

    class Silent(Session):
        def get_service_quota(self, **_: Any) -> dict[str, Any]:
            raise client_error("AccessDeniedException", "not you")

    [(problem, is_fatal)] = problems(Silent(), **parameters).items()
    assert "let a policy of this identity allow it" in problem
    assert not is_fatal


def test_a_missing_region_and_missing_credentials_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE",
                 "AWS_REGION", "AWS_DEFAULT_REGION"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for options, remedy in (
        ([], "name a --region"), ([f"--region={REGION}"], "aws configure"),
        (["--profile=none"], "aws configure"),
    ):  # fmt: skip
        assert installation.run_script(preflight.report, options) == 1
        assert remedy in capsys.readouterr().err


def test_the_gpus_of_the_template_are_all_tried_here() -> None:
    assert written()["Parameters"]["GpuName"]["AllowedValues"] == [
        "t4", "a10g", "l4", "l40s", "a100", "h100",
    ]  # fmt: skip
