"""Takes an installation on AWS away, and lists what is left and paid for.

    scripts/destroy [--yes] [--region R] [--profile P] [--stack-name NAME]

Workers end first: their jobs are handed back, and stay in the cache. The nested stack of the data
stays; named as NAME it goes too, except its buckets and the cache's last snapshot.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from infra.aws.installation import Installation, run_script
from infra.aws.parameters import DeployError, loaded

POLL_S = 10.0
_WAIT_S = 600.0
_MAX_PROTECTED = 10  # per call
_STACK = "AWS::CloudFormation::Stack"


def resources(client: Any, stack: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """What is in a stack and in those nested in it that go with it, with what their deletion does
    to each."""
    body = client.get_template(StackName=stack, TemplateStage="Processed")["TemplateBody"]
    declared = (loaded(body) if isinstance(body, str) else body)["Resources"]
    for page in client.get_paginator("list_stack_resources").paginate(StackName=stack):
        for one in page["StackResourceSummaries"]:
            if one.get("PhysicalResourceId"):
                policy = declared[one["LogicalResourceId"]].get("DeletionPolicy", "Delete")
                yield one, policy
                if one["ResourceType"] == _STACK and not policy.startswith("Retain"):
                    yield from resources(client, one["PhysicalResourceId"])


def end_workers(client: Any, services: Sequence[str]) -> None:
    """Scales services, named by ARN, to zero: the workers' last, as the pool would scale them
    again. Takes their protection off, and waits until all tasks have ended. Raises DeployError,
    what boto3 raises."""
    end_s = time.monotonic() + _WAIT_S
    for arn in sorted(services, key=lambda arn: "worker" in arn.lower()):
        cluster, service = arn.split("/")[-2:]
        client.update_service(cluster=cluster, service=service, desiredCount=0)
        while arns := client.list_tasks(cluster=cluster, serviceName=service)["taskArns"]:
            for start in range(0, len(arns), _MAX_PROTECTED):
                client.update_task_protection(
                    cluster=cluster,
                    tasks=arns[start : start + _MAX_PROTECTED],
                    protectionEnabled=False,
                )
            print(f"{service}: {len(arns)} tasks", flush=True)
            if time.monotonic() > end_s:
                raise DeployError(f"tasks of {service} do not end")
            time.sleep(POLL_S)


def leftovers(one: Installation, found: Sequence[tuple[Mapping[str, Any], str]]) -> Iterator[str]:
    """What is left of a deleted stack's resources, one line each. Raises what boto3 raises."""
    artifacts = f"{one.stack}-artifacts"
    if one.described(artifacts):
        yield f"stack {artifacts}"
        found = [*found, *resources(one.client("cloudformation"), artifacts)]
    for resource, policy in found:
        name = resource["PhysicalResourceId"]
        if policy.startswith("Retain") and resource["ResourceType"] == _STACK:
            name = (one.described(name) or {})["StackName"]
            yield f"stack {name}, with all data: scripts/destroy --stack-name {name}"
        elif policy.startswith("Retain"):
            yield f"{resource['ResourceType']} {name}"
    caches = {resource["PhysicalResourceId"] for resource, policy in found if policy == "Snapshot"}
    for snapshot in one.client("elasticache").describe_snapshots()["Snapshots"]:
        if snapshot.get("ReplicationGroupId") in caches:
            yield f"snapshot {snapshot['SnapshotName']}"


def destroy(one: Installation, ask: Callable[[str], str] = input) -> int:
    """Raises DeployError, and what boto3 raises."""
    stack = one.described(one.stack)
    if stack is None:
        raise DeployError(f"no stack {one.stack} in {one.session.region_name}: check --stack-name")
    if stack.get("EnableTerminationProtection"):
        off = "aws cloudformation update-termination-protection --no-enable-termination-protection"
        raise DeployError(f"{one.stack} is protected: first `{off} --stack-name {one.stack}`")
    if not one.is_unattended and ask(f"Delete {one.stack}? [y/N] ").strip().lower() != "y":
        raise DeployError("nothing was deleted")
    found = list(resources(one.client("cloudformation"), one.stack))
    services = [r["PhysicalResourceId"] for r, _ in found if "ECS::Service" in r["ResourceType"]]
    end_workers(one.client("ecs"), services)
    one.sam("delete", "--stack-name", one.stack, "--no-prompts")
    print("Left, and paid for, until you delete it:", *leftovers(one, found), sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(destroy))
