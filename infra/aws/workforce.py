"""What runs a pool's workers: a service of ECS, or another scaler. boto3 blocks, so callers use
threads."""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

log = logging.getLogger("batchway.pool")


@dataclass(frozen=True, slots=True)
class FailedTask:
    """A task that ended because of a worker error; Unix seconds."""

    name: str
    at_s: float


class Workforce(Protocol):
    """Every method raises botocore's ClientError or BotoCoreError. `drains`: whether workers that
    are too many are ordered to drain; otherwise who runs them chooses which to end."""

    drains: ClassVar[bool]

    def num_desired(self) -> int:
        """The desired number of workers. Raises LookupError if there is no such service."""

    def resize(self, num: int) -> None:
        """Sets the desired number; protected workers stay."""

    def keep(self, incarnations: Collection[str]) -> list[str]:
        """Protects these live workers from scale-in, and returns their tasks."""

    def version(self) -> str:
        """Names what new workers run; '' where that is not known."""

    def outdated(self, incarnations: Collection[str]) -> set[str]:
        """The live workers that a running deployment replaces."""

    def min_healthy_share(self) -> float:
        """The share of the desired workers that a deployment keeps, 0 to 1."""

    def failed(self) -> list[FailedTask]:
        """Workers of the current version that ended with an error recently."""


@dataclass
class OtherScaler:
    """A scaler that follows the metric `pool_workers_wanted`. It is not asked: what was decided
    last is the desired number, at first the number of live workers."""

    drains: ClassVar[bool] = False
    num: int | None = None

    def num_desired(self) -> int:
        return self.num or 0

    def resize(self, num: int) -> None:
        self.num = num

    def keep(self, incarnations: Collection[str]) -> list[str]:
        if self.num is None:
            self.num = len(incarnations)
        return list(incarnations)

    def version(self) -> str:
        return ""

    def outdated(self, incarnations: Collection[str]) -> set[str]:
        return set()

    def min_healthy_share(self) -> float:
        return 1.0

    def failed(self) -> list[FailedTask]:
        return []


_NOT_A_WORKER_ERROR = (
    "SpotInterruption",
    "TerminationNotice",
    "UserInitiated",
    "ServiceSchedulerInitiated",
)
# Of a service's task, whichever its stop code is.
_UNHEALTHY = re.compile("failed container health check", re.IGNORECASE)
_NO_CAPACITY = re.compile("capacity|RESOURCE:|VcpuLimitExceeded|LimitExceeded", re.IGNORECASE)
_MAX_DESCRIBED = 100  # per call
_MAX_PROTECTED_TASKS = 10  # per call
_PROTECTED_MINUTES = 30
_RENEW_S = 600.0


@dataclass(frozen=True, slots=True)
class EcsService:
    """One service of one cluster. A task is matched to its worker by the task's id, with which the
    worker's incarnation begins (worker_health.host_name). `clock_s` is monotonic."""

    drains: ClassVar[bool] = True
    client: Any
    cluster: str
    service: str
    clock_s: Callable[[], float] = time.monotonic
    _protected_s: dict[str, float] = field(default_factory=dict)  # by task, when last requested

    def num_desired(self) -> int:
        """The service's desired count. Raises LookupError if there is no such service."""
        return int(self._described()["desiredCount"])

    def resize(self, num: int) -> None:
        """Sets the desired count. ECS ends unprotected tasks only."""
        self.client.update_service(cluster=self.cluster, service=self.service, desiredCount=num)

    def keep(self, incarnations: Collection[str]) -> list[str]:
        """Protects the tasks of these live workers until they end, and returns them. A starting
        task is not protected, as that would also keep it in a deployment that is rolled back:
        infra/pool.py lowers the desired count only when none starts."""
        now_s = self.clock_s()
        live = [task["taskArn"] for task, _ in self._workers(incarnations)]
        due = [arn for arn in live if now_s - self._protected_s.get(arn, -_RENEW_S) >= _RENEW_S]
        for start in range(0, len(due), _MAX_PROTECTED_TASKS):
            answer = self.client.update_task_protection(
                cluster=self.cluster,
                tasks=due[start : start + _MAX_PROTECTED_TASKS],
                protectionEnabled=True,
                expiresInMinutes=_PROTECTED_MINUTES,
            )
            for failure in answer.get("failures", []):
                log.warning("task not protected: %s", failure.get("reason"))
            protected = [task["taskArn"] for task in answer["protectedTasks"]]
            self._protected_s.update(dict.fromkeys(protected, now_s))
        for arn in self._protected_s.keys() - set(live):
            del self._protected_s[arn]
        return live

    def version(self) -> str:
        """The service's task definition."""
        return str(self._described()["taskDefinition"])

    def outdated(self, incarnations: Collection[str]) -> set[str]:
        """Returns the workers whose task has another task definition than the service."""
        current = self.version()
        return {
            name
            for task, name in self._workers(incarnations)
            if task["taskDefinitionArn"] != current
        }

    def min_healthy_share(self) -> float:
        """The share of the desired workers that a deployment keeps, 0 to 1."""
        settings = self._described().get("deploymentConfiguration", {})
        return float(settings.get("minimumHealthyPercent", 100)) / 100

    def failed(self) -> list[FailedTask]:
        """Tasks of the last hour (ECS keeps no more) whose container ended with an error, or was
        ended because its health check failed."""
        current = self.version()
        return [
            FailedTask(task["taskArn"], task["stoppedAt"].timestamp())
            for task in self._tasks("STOPPED")
            if "stoppedAt" in task and task["taskDefinitionArn"] == current and _has_failed(task)
        ]

    def _described(self) -> dict[str, Any]:
        found = self.client.describe_services(cluster=self.cluster, services=[self.service])
        if not found["services"]:
            raise LookupError(f"no service {self.service!r} in cluster {self.cluster!r}")
        service: dict[str, Any] = found["services"][0]
        return service

    def _workers(self, incarnations: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields running tasks with their worker's incarnation."""
        by_host = {name.partition("-")[0]: name for name in incarnations}
        for task in self._tasks("RUNNING"):
            if (name := by_host.get(task["taskArn"].rpartition("/")[2])) is not None:
                yield task, name

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
    """Whether a task failed. Not if it found no machine: starting it later may succeed."""
    if _UNHEALTHY.search(task.get("stoppedReason", "")):
        return True
    if task.get("stopCode") in _NOT_A_WORKER_ERROR:
        return False
    if task.get("stopCode") == "TaskFailedToStart":
        return not _NO_CAPACITY.search(task.get("stoppedReason", ""))
    return any(container.get("exitCode") for container in task.get("containers", []))
