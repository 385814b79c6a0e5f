"""The workers as an ECS service."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from infra.aws.workforce import Failed

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
