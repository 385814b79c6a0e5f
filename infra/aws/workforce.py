"""What runs the workers of a pool: an ECS service, or an Auto Scaling group of machines. boto3
blocks, so callers use threads."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Failed:
    """A task or machine that ended because of a worker error; Unix seconds."""

    name: str
    at_s: float


class Workforce(Protocol):
    """Every method raises botocore's ClientError or BotoCoreError."""

    def num_desired(self) -> int:
        """The desired number of workers. Raises LookupError if there is no such service or
        group.
        """

    def resize(self, num: int) -> None:
        """Sets the desired number; protected workers stay."""

    def keep(self, incarnations: Collection[str]) -> None:
        """Protects these live workers from scale-in."""

    def failed(self) -> list[Failed]:
        """Workers that ended with an error recently."""

    def healthy(self) -> list[str]:
        """Names of healthy workers."""


_NOT_A_WORKER_ERROR = (
    "SpotInterruption",
    "TerminationNotice",
    "UserInitiated",
    "ServiceSchedulerInitiated",
)
_MAX_DESCRIBED = 100  # per call


@dataclass(frozen=True, slots=True)
class EcsService:
    """One service of one cluster. Every method raises botocore's ClientError or BotoCoreError."""

    client: Any
    cluster: str
    service: str

    def num_desired(self) -> int:
        """The service's desired count. Raises LookupError if there is no such service."""
        found = self.client.describe_services(cluster=self.cluster, services=[self.service])
        if not found["services"]:
            raise LookupError(f"no service {self.service!r} in cluster {self.cluster!r}")
        return int(found["services"][0]["desiredCount"])

    def resize(self, num: int) -> None:
        """Sets the desired count. ECS leaves protected tasks alone."""
        self.client.update_service(cluster=self.cluster, service=self.service, desiredCount=num)

    def keep(self, incarnations: Collection[str]) -> None:
        """Does nothing: a task protects itself while it has jobs (task_protection.py)."""

    def failed(self) -> list[Failed]:
        """Tasks of the last hour (ECS keeps no more) whose container ended with an error."""
        return [
            Failed(task["taskArn"], task["stoppedAt"].timestamp())
            for task in self._tasks("STOPPED")
            if "stoppedAt" in task and _has_failed(task)
        ]

    def healthy(self) -> list[str]:
        """Names of running tasks whose health check has passed."""
        running = self._tasks("RUNNING")
        return [task["taskArn"] for task in running if task.get("healthStatus") == "HEALTHY"]

    def _tasks(self, desired_status: str) -> list[dict[str, Any]]:
        listed = self.client.list_tasks(
            cluster=self.cluster, serviceName=self.service, desiredStatus=desired_status
        )
        arns = listed["taskArns"][:_MAX_DESCRIBED]
        if not arns:
            return []
        described = self.client.describe_tasks(cluster=self.cluster, tasks=arns)
        return list(described["tasks"])


def _has_failed(task: dict[str, Any]) -> bool:
    if task.get("stopCode") in _NOT_A_WORKER_ERROR:
        return False
    codes = [container.get("exitCode") for container in task.get("containers", [])]
    return task.get("stopCode") == "TaskFailedToStart" or any(codes)


_MAX_PROTECTED = 50  # per call
_MAX_ACTIVITIES = 100
_ENDED = re.compile(r"Terminating EC2 instance: (i-[0-9a-f]+)")
# Set by `aws autoscaling set-instance-health`; EC2's own checks fail for other reasons.
_REPORTED_BY_WORKER = "user health-check"


@dataclass(frozen=True, slots=True)
class ScalingGroup:
    """A group of machines that each run one worker, for example under systemd. Every method raises
    botocore's ClientError or BotoCoreError.

    A machine is matched to its worker by host name: the launch template must name hosts by instance
    (`HostnameType: resource-name`). The machines need no permissions for this.
    """

    client: Any
    name: str

    def num_desired(self) -> int:
        """The group's desired capacity. Raises LookupError if there is no such group."""
        return int(self._group()["DesiredCapacity"])

    def resize(self, num: int) -> None:
        """Sets the desired capacity. The group ends unprotected machines in time."""
        self.client.set_desired_capacity(
            AutoScalingGroupName=self.name, DesiredCapacity=num, HonorCooldown=False
        )

    def keep(self, incarnations: Collection[str]) -> None:
        """Protects only the machines of these workers from scale-in: starting machines hold no
        jobs, and a machine whose worker has left should end."""
        machines = self._in_service()
        for is_kept in (True, False):
            changed = [
                machine["InstanceId"]
                for machine in machines
                if _has_worker(machine, incarnations) is is_kept
                and machine["ProtectedFromScaleIn"] is not is_kept
            ]
            for start in range(0, len(changed), _MAX_PROTECTED):
                self.client.set_instance_protection(
                    AutoScalingGroupName=self.name,
                    InstanceIds=changed[start : start + _MAX_PROTECTED],
                    ProtectedFromScaleIn=is_kept,
                )

    def failed(self) -> list[Failed]:
        """Machines that reported themselves unhealthy and were ended."""
        listed = self.client.describe_scaling_activities(
            AutoScalingGroupName=self.name, MaxRecords=_MAX_ACTIVITIES
        )
        return [
            Failed(ended[1], activity["StartTime"].timestamp())
            for activity in listed["Activities"]
            if (ended := _ENDED.match(activity.get("Description", "")))
            and _REPORTED_BY_WORKER in activity["Cause"]
        ]

    def healthy(self) -> list[str]:
        """Protected machines: their worker sends heartbeats."""
        return [m["InstanceId"] for m in self._in_service() if m["ProtectedFromScaleIn"]]

    def _in_service(self) -> list[dict[str, Any]]:
        """Only machines in service can be protected."""
        return [m for m in self._group()["Instances"] if m["LifecycleState"] == "InService"]

    def _group(self) -> dict[str, Any]:
        found = self.client.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])
        if not found["AutoScalingGroups"]:
            raise LookupError(f"no Auto Scaling group {self.name!r}")
        group: dict[str, Any] = found["AutoScalingGroups"][0]
        return group


def _has_worker(machine: dict[str, Any], incarnations: Collection[str]) -> bool:
    return any(name.startswith(f"{machine['InstanceId']}-") for name in incarnations)
