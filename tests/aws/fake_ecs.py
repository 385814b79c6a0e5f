"""An ECS that behaves as documented, for one service: it ends any unprotected task above the
desired count, starts replacements, and rolls a new task definition out within its limits.

https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-scheduler-concepts
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from infra.aws.pool_service import PoolState, ReadyWorker

START_TICKS = 3


@dataclass(eq=False)
class Task:
    """One task; its worker sends heartbeats from `ready_tick` on."""

    number: int
    definition: str
    ready_tick: int
    num_jobs: int = 0
    is_protected: bool = False
    is_draining: bool = False

    @property
    def arn(self) -> str:
        return f"arn:aws:ecs:r:1:task/c/{self.number:032x}"

    @property
    def incarnation(self) -> str:
        return f"{self.number:032x}-1-ab"


@dataclass
class FakeEcs:
    """Has the methods of boto3's client that the pool calls. `ended_with_jobs` are tasks that ECS
    ended although their worker held jobs."""

    rng: random.Random
    num_desired: int
    min_percent: int = 100
    max_percent: int = 200
    definition: str = "worker:1"
    now: int = 0
    num_started: int = 0
    tasks: list[Task] = field(default_factory=list)
    ended_with_jobs: list[Task] = field(default_factory=list)

    def describe_services(self, **_: Any) -> dict[str, Any]:
        limits = {
            "minimumHealthyPercent": self.min_percent,
            "maximumPercent": self.max_percent,
        }
        service = {
            "desiredCount": self.num_desired,
            "taskDefinition": self.definition,
            "deploymentConfiguration": limits,
        }
        return {"services": [service]}

    def list_tasks(self, *, desiredStatus: str, **_: Any) -> dict[str, Any]:
        return {"taskArns": [t.arn for t in self.tasks] if desiredStatus == "RUNNING" else []}

    def describe_tasks(self, *, tasks: list[str], **_: Any) -> dict[str, Any]:
        shown = [task for task in self.tasks if task.arn in tasks]
        return {"tasks": [{"taskArn": t.arn, "taskDefinitionArn": t.definition} for t in shown]}

    def update_service(self, *, desiredCount: int, **_: Any) -> None:
        self.num_desired = desiredCount

    def update_task_protection(self, *, tasks: list[str], **_: Any) -> dict[str, Any]:
        assert len(tasks) <= 10, "ECS takes ten tasks at most"
        for task in self.tasks:
            task.is_protected |= task.arn in tasks
        return {"protectedTasks": [{"taskArn": arn} for arn in tasks], "failures": []}

    def start(self, num: int, *, is_ready: bool = False) -> None:
        for _ in range(num):
            ready_tick = self.now if is_ready else self.now + self.rng.randint(1, START_TICKS)
            self.tasks.append(Task(self.num_started, self.definition, ready_tick))
            self.num_started += 1

    def drain(self, incarnations: list[str]) -> None:
        for task in self.tasks:
            task.is_draining |= task.incarnation in incarnations

    def tick(self) -> None:
        """Jobs end, drained workers exit, and the scheduler acts."""
        self.now += 1
        for task in self.tasks:
            if task.num_jobs and self.rng.random() < 0.3:
                task.num_jobs -= 1
        self.tasks = [task for task in self.tasks if task.num_jobs or not task.is_draining]
        current = [task for task in self.tasks if task.definition == self.definition]
        most = self.num_desired * self.max_percent // 100
        fewest = math.ceil(self.num_desired * self.min_percent / 100)
        old = [task for task in self.tasks if task not in current]
        num_healthy = sum(task.ready_tick <= self.now for task in self.tasks)
        self._end(old, min(len(old), max(0, num_healthy - fewest)))
        self._end(current, max(0, len(current) - self.num_desired))
        room = max(most, self.num_desired) - len(self.tasks)
        self.start(max(0, min(room, self.num_desired - len(current))))

    def _end(self, tasks: list[Task], num: int) -> None:
        """Ends unprotected tasks, whichever."""
        exposed = [task for task in tasks if not task.is_protected]
        for task in self.rng.sample(exposed, min(num, len(exposed))):
            self.tasks.remove(task)
            if task.num_jobs:
                self.ended_with_jobs.append(task)

    def sight(self, load: float = 0.0, queued_tokens: int = 0) -> PoolState:
        """What Redis knows of the workers: those that send heartbeats. `load` is each one's."""
        live = [task for task in self.tasks if task.ready_tick <= self.now]
        workers = tuple(
            ReadyWorker(task.incarnation, task.num_jobs, load)
            for task in live
            if not task.is_draining
        )
        names = tuple(task.incarnation for task in live)
        return PoolState({"interactive": queued_tokens}, workers, None, names)
