"""Checks an account before a deployment, and says what to do. Exit status 0 or 1; changes nothing.

scripts/preflight [--region R] [--profile P] [--parameters FILE]
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infra.aws.installation import Installation, declared_parameters, run_script

_UNRESERVED = 100  # environments that Lambda keeps unreserved in every account
_FEW = 100  # fewer environments at a time than a service needs
_MACHINE_VCPUS = 4  # the smallest that Managed Instances may choose
# Quotas of EC2 in vCPUs, by the first letter of the instance family and the way it is bought.
_QUOTAS = {
    ("g", "ON_DEMAND"): ("L-DB2E81BA", "Running On-Demand G and VT instances"),
    ("g", "SPOT"): ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    ("p", "ON_DEMAND"): ("L-417A185B", "Running On-Demand P instances"),
    ("p", "SPOT"): ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
}
_DURABLE_FAMILIES = ("m6g", "m7g", "m8g", "r6g", "r7g", "r8g", "c7gn", "c8gn")  # ElastiCache's
_P_GPUS = ("a100", "h100")
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


Check = Callable[[Installation, dict[str, str]], Iterator[Finding]]


def check_network(one: Installation, values: dict[str, str]) -> Iterator[Finding]:
    """Checks for two zones, one VPC, and a way out of each subnet."""
    what, ec2 = "subnets", one.client("ec2")
    names = [name for name in values["PrivateSubnetIds"].split(",") if name]
    if not names:
        yield Finding(what, "name PrivateSubnetIds, private subnets in two zones")
        return
    subnets = ec2.describe_subnets(SubnetIds=names)["Subnets"]
    if foreign := [s["SubnetId"] for s in subnets if s["VpcId"] != values["VpcId"]]:
        yield Finding(what, f"{foreign[0]} is not in VpcId")
    if len({subnet["AvailabilityZone"] for subnet in subnets}) < 2:
        yield Finding(what, "one zone only: the cache needs subnets in two")
    tables = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [values["VpcId"]]}])[
        "RouteTables"
    ]
    closed = [name for name in names if not _has_way_out(name, tables)]
    if closed:
        yield Finding(
            what,
            f"{closed[0]} has no way out: its route table needs 0.0.0.0/0 through a NAT gateway, "
            "for Secrets Manager, images and callbacks",
        )
    else:
        yield Finding(f"{what}: a way out of each")


def _has_way_out(subnet: str, tables: Sequence[dict[str, Any]]) -> bool:
    """Whether there is a way out by its own route table, or else by the VPC's main one."""
    own = [t for t in tables if any(a.get("SubnetId") == subnet for a in t["Associations"])]
    main = [t for t in tables if any(a.get("Main") for a in t["Associations"])]
    routes = (route for table in own or main for route in table["Routes"])
    gateways = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId")
    return any(
        route.get("DestinationCidrBlock") == "0.0.0.0/0" and any(route.get(g) for g in gateways)
        for route in routes
    )


def check_log_role(one: Installation, values: dict[str, str]) -> Iterator[Finding]:
    what = "API Gateway's log role"
    if one.client("apigateway").get_account().get("cloudwatchRoleArn"):
        yield Finding(what)
    elif values["WithApiLogRole"] == "yes":
        yield Finding(f"{what}: the stack makes it")
    else:
        yield Finding(what, 'the account has none in this region: set "WithApiLogRole": "yes"')


def check_cache(_: Installation, values: dict[str, str]) -> Iterator[Finding]:
    family = values["CacheNodeType"].removeprefix("cache.").partition(".")[0]
    if values["Durability"] == "durable" and family not in _DURABLE_FAMILIES:
        yield Finding(
            "cache",
            f"{values['CacheNodeType']} cannot be durable: take CacheNodeType cache.m7g.large or "
            f"another of {', '.join(_DURABLE_FAMILIES)}",
        )


def check_concurrency(one: Installation, values: dict[str, str]) -> Iterator[Finding]:
    what = "Lambda's concurrency"
    limits = one.client("lambda").get_account_settings()["AccountLimit"]
    limit, free = limits["ConcurrentExecutions"], limits["UnreservedConcurrentExecutions"]
    reserved = int(values["ReservedStreams"])
    if reserved > max(0, free - _UNRESERVED):
        yield Finding(
            what,
            f"{reserved} streams cannot be reserved of {free} unreserved: set ReservedStreams to "
            f"{max(0, free - _UNRESERVED)} or less, or ask for quota L-B99A9384",
        )
    elif limit < _FEW:
        yield Finding(
            what, f"{limit} calls at a time; ask for quota L-B99A9384 of Lambda", is_fatal=False
        )
    else:
        yield Finding(f"{what}: {limit}")


def check_gpus(one: Installation, values: dict[str, str]) -> Iterator[Finding]:
    """Checks the vCPU quota, and for an Auto Scaling group that a zone offers the type."""
    if values["CapacityKind"] == "own-machines":
        return
    is_group = values["CapacityKind"] == "auto-scaling-group"
    kind = values["GpuInstanceType"]
    family = kind[0] if is_group else "p" if values["GpuName"] in _P_GPUS else "g"
    vcpus, bought = _MACHINE_VCPUS, "ON_DEMAND" if is_group else values["CapacityOption"]
    if is_group:
        ec2 = one.client("ec2")
        subnets = ec2.describe_subnets(SubnetIds=values["PrivateSubnetIds"].split(","))["Subnets"]
        zones = {subnet["AvailabilityZone"] for subnet in subnets}
        offers = ec2.describe_instance_type_offerings(
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [kind]}],
        )["InstanceTypeOfferings"]
        if not zones & {offer["Location"] for offer in offers}:
            yield Finding("GPU machines", f"no zone of the subnets offers {kind}")
            return
        described = ec2.describe_instance_types(InstanceTypes=[kind])["InstanceTypes"]
        vcpus = described[0]["VCpuInfo"]["DefaultVCpus"]
    if (quota := _QUOTAS.get((family, bought))) is None:
        return
    code, name = quota
    answer = one.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)
    allowed, most = int(answer["Quota"]["Value"]), int(values["MaxWorkers"])
    what = f"quota {code}, {name}"
    if allowed < vcpus:
        yield Finding(what, f"{allowed} vCPUs: no worker can start; ask for {most * vcpus}")
    elif allowed < most * vcpus:
        problem = f"{allowed} vCPUs allow {allowed // vcpus} of {most} workers"
        yield Finding(what, problem, is_fatal=False)
    else:
        yield Finding(f"{what}: {allowed} vCPUs")


def check_images(one: Installation, values: dict[str, str]) -> Iterator[Finding]:
    for name in ("WorkerImageUri", "ServicesImageUri"):
        parts = _ECR.fullmatch(values[name])
        if parts is None:
            yield Finding(f"{name}: not in ECR, not checked")
            continue
        account, region, repository, digest, tag = parts.groups()
        if region != one.session.region_name:
            yield Finding(name, f"is in {region}, not in {one.session.region_name}", is_fatal=False)
        image = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
        ecr = one.session.client("ecr", region_name=region)
        try:
            ecr.describe_images(registryId=account, repositoryName=repository, imageIds=[image])
        except (
            ecr.exceptions.ImageNotFoundException,
            ecr.exceptions.RepositoryNotFoundException,
        ):
            yield Finding(name, f"no image {values[name]}: push it, or leave the name out")
        else:
            yield Finding(f"{name}: found")


CHECKS: tuple[Check, ...] = (
    check_network, check_log_role, check_cache, check_concurrency, check_gpus, check_images,
)  # fmt: skip


def findings(one: Installation, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Yields the checks' results. If AWS does not answer a check, that is reported, but not
    fatal."""
    from botocore.exceptions import BotoCoreError, ClientError

    values = {name: default or "" for name, default in declared_parameters().items()}
    values |= one.parameters
    for check in checks:
        try:
            yield from check(one, values)
        except (BotoCoreError, ClientError) as exc:
            what = check.__name__.replace("_", " ")
            yield Finding(what, f"not possible: {exc}", is_fatal=_is_fatal(exc))


def _is_fatal(exc: Exception) -> bool:
    """Whether the answer says that a named thing does not exist."""
    code = str(getattr(exc, "response", {}).get("Error", {}).get("Code", ""))
    return code.endswith(".NotFound")


def report(one: Installation) -> bool:
    """Prints each finding. Returns whether a deployment can succeed."""
    is_well = True
    for finding in findings(one):
        print(finding.line(), flush=True)
        is_well &= not (finding.problem and finding.is_fatal)
    return is_well


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("scripts/preflight", __doc__, lambda one: int(not report(one)), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
