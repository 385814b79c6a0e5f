"""Checks an account and the parameters before anything is built, and says what to do.

    scripts/preflight [--region R] [--profile P] [--stack-name NAME]

Each parameter is checked by the template's own declaration, and together by what AWS offers in
this region. Exit status 0 or 1; changes nothing on AWS.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, collapse_addresses
from typing import Any

from infra.aws.installation import Installation, code_of, explained, run_script
from infra.aws.parameters import IMAGES, complete, faults

_UNRESERVED = 100  # environments that Lambda keeps unreserved; fewer are too few for a service
_NEEDED = (
    "ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "s3", "secretsmanager",
)  # fmt: skip
"""Endpoints that a VPC without a way out must have. Those of ecs-agent and ecs-telemetry are for
the agent on workers' machines, by ECS' documentation. Metrics leave by the logs."""
# Quotas of EC2 in vCPUs, by the start of an instance type and the way it is bought.
_QUOTAS = (
    ("g", "ON_DEMAND", "L-DB2E81BA", "Running On-Demand G and VT instances"),
    ("g", "SPOT", "L-3819A6DF", "All G and VT Spot Instance Requests"),
    ("p", "ON_DEMAND", "L-417A185B", "Running On-Demand P instances"),
    ("p5", "SPOT", "L-C4BD4855", "All P5 Spot Instance Requests"),
    ("p", "SPOT", "L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
)
_BUILD_QUOTAS = {
    "WorkerImageUri": ("L-4DDC4A99", "Concurrently running builds for Linux/Large environment"),
    "ServicesImageUri": ("L-5ED1D25B", "Concurrently running builds for ARM/Small environment"),
}
_DURABLE_FAMILIES = ("m6g", "m7g", "m8g", "r6g", "r7g", "r8g", "c7gn", "c8gn")  # ElastiCache's
_ECR = re.compile(
    r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com[^/]*/(.+?)(?:@(sha256:\w+)|:([^:/@]+))?"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result. `problem` is empty if all is well; `is_fatal` ones fail the deployment."""

    what: str
    problem: str = ""
    is_fatal: bool = True

    def line(self) -> str:
        if not self.problem:
            return f"ok    {self.what}"
        return f"{'FAIL ' if self.is_fatal else 'note '} {self.what}: {self.problem}"


def check_network(one: Installation, values: Mapping[str, str]) -> Iterator[Finding]:
    """Checks for two zones, one VPC, a way to AWS from each subnet, and one to S3 beside NAT."""
    what, subnets, vpc = "subnets", _subnets(one, values), values.get("VpcId")
    if not subnets or not vpc:
        return
    if foreign := [s["SubnetId"] for s in subnets if s["VpcId"] != vpc]:
        yield Finding(what, f"{foreign[0]} is not in VpcId {vpc}")
    if len({subnet["AvailabilityZone"] for subnet in subnets}) < 2:
        yield Finding(what, "one zone only: the cache needs subnets in two")
    ec2, own = one.client("ec2"), [{"Name": "vpc-id", "Values": [vpc]}]
    tables = ec2.describe_route_tables(Filters=own)["RouteTables"]
    used = {s["SubnetId"]: _tables_of(s["SubnetId"], tables) for s in subnets}
    closed = [name for name, routes in used.items() if not _lead_out(routes)]
    found = ec2.describe_vpc_endpoints(Filters=own)["VpcEndpoints"]
    ends = [e["ServiceName"] for e in found if e.get("State", "available").lower() == "available"]
    ends += [".s3"] if values.get("PrivateRouteTableIds") else []  # which the stack makes
    lacking = [n for n in _NEEDED if not any(end.endswith(f".{n}") for end in ends)]
    problem = f"{closed[0]} has no way out: callbacks reach this VPC only" if closed else ""
    if closed and lacking:
        problem = f"{closed[0]} has no way to AWS: give its route table 0.0.0.0/0 through a NAT "
        problem += f"gateway or a VPN, or this VPC endpoints for {', '.join(lacking)}"
    yield Finding(f"{what}: a way out of each", problem, bool(lacking))
    if "s3" in lacking and not closed:
        names = sorted({table["RouteTableId"] for routes in used.values() for table in routes})
        problem = "weights and images would pay the NAT gateway at every cold start: set "
        yield Finding("S3", f"{problem}PrivateRouteTableIds to {','.join(names)}", is_fatal=False)


def _subnets(one: Installation, values: Mapping[str, str]) -> list[Any]:
    names = [name.strip() for name in values.get("PrivateSubnetIds", "").split(",") if name]
    return list(one.client("ec2").describe_subnets(SubnetIds=names)["Subnets"]) if names else []


def _lead_out(tables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether routes lead everywhere. An internet gateway does not serve functions and tasks,
    which have no public address."""
    led = [
        IPv4Network(route["DestinationCidrBlock"])
        for route in (route for table in tables for route in table["Routes"])
        if "DestinationCidrBlock" in route
        and route.get("State") != "blackhole"
        and not str(route.get("GatewayId", "")).startswith("igw-")
    ]
    return IPv4Network("0.0.0.0/0") in collapse_addresses(led)


def _tables_of(subnet: str, tables: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Its own route table, or else the VPC's main one."""
    own = [t for t in tables if any(a.get("SubnetId") == subnet for a in t["Associations"])]
    return own or [t for t in tables if any(a.get("Main") for a in t["Associations"])]


def check_log_role(one: Installation, values: Mapping[str, str]) -> Iterator[Finding]:
    account = one.client("apigateway").get_account()
    is_there = account.get("cloudwatchRoleArn") or values["WithApiLogRole"] == "yes"
    problem = 'the account has none in this region: set "WithApiLogRole": "yes"'
    yield Finding("API Gateway's log role", "" if is_there else problem)


def check_cache(_: Installation, values: Mapping[str, str]) -> Iterator[Finding]:
    kind = values["CacheNodeType"]
    if values["Durability"] == "durable" and kind.split(".")[1] not in _DURABLE_FAMILIES:
        others = f"cache.m7g.large or another of {', '.join(_DURABLE_FAMILIES)}"
        yield Finding("cache", f"{kind} cannot be durable: take CacheNodeType {others}")


def check_concurrency(one: Installation, values: Mapping[str, str]) -> Iterator[Finding]:
    what = "Lambda's concurrency"
    limits = one.client("lambda").get_account_settings()["AccountLimit"]
    limit, reserved = limits["ConcurrentExecutions"], int(values.get("ReservedStreams", 0))
    most = max(0, limits["UnreservedConcurrentExecutions"] - _UNRESERVED)
    problem = (
        f"{limit} calls at a time; ask for quota L-B99A9384 of Lambda"
        if limit < _UNRESERVED
        else ""
    )
    if reserved > most:
        problem = f"{reserved} streams cannot be reserved: set ReservedStreams to {most} or less, "
        problem += "or ask for quota L-B99A9384"
    yield Finding(what, problem, reserved > most)


def check_gpus(one: Installation, values: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that a zone of the subnets offers machines for a worker, and the quota of vCPUs."""
    wanted = values["GpuName"]
    zones = {subnet["AvailabilityZone"] for subnet in _subnets(one, values)}
    ec2 = one.client("ec2")
    names = [{"Name": "instance-type", "Values": ["g*", "p*"]}]
    here = [{"Name": "location", "Values": sorted(zones)}]
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=here
    )
    offered = {one["InstanceType"] for page in pages for one in page["InstanceTypeOfferings"]}
    pages = ec2.get_paginator("describe_instance_types").paginate(Filters=names)
    fitting = sorted(
        (machine["VCpuInfo"]["DefaultVCpus"], machine["InstanceType"])
        for page in pages
        for machine in page["InstanceTypes"]
        if machine["InstanceType"] in offered and _fits(machine, wanted, values)
    )
    if zones and not fitting:
        problem = f"no zone of the subnets offers {wanted} with {values['WorkerGpus']} GPU"
        yield Finding("GPU machines", f"{problem}: take another one, or another WorkerGpus")
    elif zones:
        yield from _vcpus(one, *fitting[0], values["CapacityOption"], int(values["MaxWorkers"]))


def _fits(machine: Mapping[str, Any], wanted: str, values: Mapping[str, str]) -> bool:
    """Whether a worker may run on it: it has exactly so many GPUs of this name."""
    gpus, num_gpus = machine.get("GpuInfo", {}).get("Gpus", []), int(values["WorkerGpus"])
    names = [one["Name"].lower().replace(" ", "-") for one in gpus for _ in range(one["Count"])]
    has_cpu = "x86_64" in machine["ProcessorInfo"]["SupportedArchitectures"]
    return names == [wanted] * num_gpus and has_cpu


def _vcpus(one: Installation, vcpus: int, kind: str, how: str, most: int) -> Iterator[Finding]:
    fitting = [q for q in _QUOTAS if q[1] == how and kind.startswith(q[0])]
    for _, _, code, name in fitting[:1]:
        allowed, what = _quota(one, "ec2", code), f"quota {code}, {name}"
        problem = f"{allowed} vCPUs allow {allowed // vcpus} of {most} workers"
        if allowed < vcpus:
            problem = f"{allowed} vCPUs, a worker on {kind} needs {vcpus}: ask for {most * vcpus}"
        yield Finding(what, problem if allowed < most * vcpus else "", allowed < vcpus)


def _quota(one: Installation, service: str, code: str) -> int:
    found = one.client("service-quotas").get_service_quota(ServiceCode=service, QuotaCode=code)
    return int(found["Quota"]["Value"])


def check_images(one: Installation, values: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that named images exist, and that the others can be built."""
    for name in IMAGES:
        yield from _answered(name, _check_image(one, name, values.get(name)))


def _check_image(one: Installation, name: str, uri: str | None) -> Iterator[Finding]:
    if uri is None:
        code, quota = _BUILD_QUOTAS[name]
        problem = f"is 0: ask for 1, or build and push {name} yourself"
        yield Finding(f"quota {code}, {quota}", "" if _quota(one, "codebuild", code) else problem)
    elif (parts := _ECR.fullmatch(uri)) is None:
        yield Finding(f"{name}: not in ECR, not checked")
    else:
        account, region, repository, digest, tag = parts.groups()
        image = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
        ecr = one.session.client("ecr", region_name=region)
        ecr.describe_images(registryId=account, repositoryName=repository, imageIds=[image])
        yield Finding(f"{name}: found")


CHECKS = (check_network, check_log_role, check_cache, check_concurrency, check_gpus, check_images)


def findings(one: Installation) -> Iterator[Finding]:
    sound = dict(one.parameters)
    for name, problem in faults(one.parameters):
        sound.pop(name, None)
        if name not in IMAGES or not problem.startswith(("is missing", "is not of the files")):
            yield Finding(name, problem)
    values = complete(sound)
    for check in CHECKS:
        yield from _answered(check.__name__.removeprefix("check_"), check(one, values))


def _answered(what: str, found: Iterator[Finding]) -> Iterator[Finding]:
    """Yields what a check finds. If AWS does not answer it, that is reported, but fatal only where
    it says that a named thing does not exist."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield from found
    except (BotoCoreError, ClientError) as exc:
        yield Finding(what, explained(exc), bool(re.search("NotFound|Malformed", code_of(exc))))


def report(one: Installation) -> int:
    """Prints each finding. Returns 0 if a deployment can succeed."""
    status = 0
    for finding in findings(one):
        print(finding.line(), flush=True)
        status |= bool(finding.problem) and finding.is_fatal
    return status


if __name__ == "__main__":
    raise SystemExit(run_script(report))
