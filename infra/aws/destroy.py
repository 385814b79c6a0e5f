"""Takes an installation on AWS away, and lists what is left and paid for.

    scripts/destroy [--yes] [--region R] [--profile P] [--stack-name NAME]

Workers end first: their jobs are handed back, and stay in the cache's last snapshot.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infra.aws.deploy import sam
from infra.aws.installation import DeployError, Installation, run_script

_POLL_S = 10.0
_WAIT_S = 600.0
_MAX_PROTECTED = 10  # per call


def end_workers(
    client: Any,
    cluster: str,
    services: Sequence[str],
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Scales services to zero, the pool first, which would scale the workers again; takes their
    protection off, and waits until all tasks have ended. Raises DeployError, what boto3 raises."""
    end_s = clock_s() + _WAIT_S
    for service in services:
        client.update_service(cluster=cluster, service=service, desiredCount=0)
        while arns := client.list_tasks(cluster=cluster, serviceName=service)["taskArns"]:
            for start in range(0, len(arns), _MAX_PROTECTED):
                client.update_task_protection(
                    cluster=cluster,
                    tasks=arns[start : start + _MAX_PROTECTED],
                    protectionEnabled=False,
                )
            print(f"{service}: {len(arns)} tasks", flush=True)
            if clock_s() > end_s:
                raise DeployError(f"tasks of {service} do not end")
            sleep(_POLL_S)


def services_of(client: Any, cluster: str, stack: str) -> list[str]:
    """Names of the pool's service and the workers', in the order in which they end."""
    arns = client.list_services(cluster=cluster)["serviceArns"]
    names = [arn.rpartition("/")[2] for arn in arns]
    return sorted(names, key=lambda name: name == f"{stack}-worker")


def leftovers(one: Installation) -> Iterator[str]:
    """What a deleted stack leaves, one line each. Raises what boto3 raises."""
    for bucket in one.client("s3").list_buckets()["Buckets"]:
        if bucket["Name"].startswith((one.stack, "aws-sam-cli-managed-default")):
            yield f"bucket {bucket['Name']}"
    for snapshot in one.client("elasticache").describe_snapshots()["Snapshots"]:
        if one.stack in snapshot.get("ReplicationGroupId", ""):
            yield f"snapshot {snapshot['SnapshotName']}"
    for repository in one.client("ecr").describe_repositories()["repositories"]:
        if repository["repositoryName"].startswith(one.stack):
            yield f"images {repository['repositoryName']}"
    for stack in one.client("cloudformation").describe_stacks()["Stacks"]:
        if stack["StackName"] in (f"{one.stack}-artifacts", "aws-sam-cli-managed-default"):
            yield f"stack {stack['StackName']}"


def destroy(one: Installation, ask: Callable[[str], str] = input) -> int:
    """Raises DeployError, and what boto3 raises."""
    if not one.is_unattended and ask(f"Delete {one.stack}? [y/N] ").strip().lower() != "y":
        raise DeployError("nothing was deleted")
    if cluster := one.outputs(one.stack).get("ClusterName"):
        ecs = one.client("ecs")
        end_workers(ecs, cluster, services_of(ecs, cluster, one.stack))
    sam(one, "delete", "--stack-name", one.stack, "--no-prompts")
    print("Left, and paid for, until you delete it:")
    for line in leftovers(one):
        print(f"  {line}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("scripts/destroy", __doc__, destroy, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
