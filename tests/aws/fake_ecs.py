"""An ECS that behaves as documented, for one service: it ends any unprotected task above the
desired count, starts replacements, and rolls a new task definition out within its limits.

https://docs.aws.amazon.com/AmazonECS/latest/developerguide/service-scheduler-concepts
"""

import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from infra.aws.pool_service import PoolState, ReadyWorker

START_TICKS = 3
TICK_S = 5.0
EPOCH_S = 1_000.0  # of tick 0, in Unix time
KEPT_TICKS = 720  # an hour, for which ECS shows stopped tasks


@dataclass(eq=False)
class Task:
    """One task; its worker sends heartbeats from `ready_tick` on."""

    number: int
    definition: str
    ready_tick: int  # of its first heartbeat
    fails_tick: float = math.inf  # when it ends by itself
    num_jobs: int = 0
    is_protected: bool = False
    is_draining: bool = False
    reason: dict[str, Any] = field(default_factory=dict)  # of its end, as in DescribeTasks

    @property
    def arn(self) -> str:
        return f"arn:aws:ecs:r:1:task/c/{self.number:032x}"

    @property
    def incarnation(self) -> str:
        return f"{self.number:032x}-1-ab"


@dataclass
class FakeEcs:
    """Has the methods of boto3's client that the pool calls. `ended_with_jobs` are tasks that ECS
    ended although their worker held jobs, `ended_starting` those that it ended before they were
    ready. A tick is TICK_S."""

    rng: random.Random
    num_desired: int
    min_percent: int = 100
    max_percent: int = 200
    definition: str = "worker:1"
    now: int = 0
    num_started: int = 0
    start_ticks: int = 0  # of each task; 0: up to START_TICKS
    unfit: dict[str, int] = field(default_factory=dict)  # definitions: after how long they fail
    reason: dict[str, Any] = field(default_factory=dict)  # of a failure, as in DescribeTasks
    tasks: list[Task] = field(default_factory=list)
    stopped: list[tuple[Task, int]] = field(default_factory=list)  # with the tick
    ended_with_jobs: list[Task] = field(default_factory=list)
    ended_starting: list[Task] = field(default_factory=list)

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
        lately = [task for task, tick in self.stopped if self.now - tick < KEPT_TICKS]
        return {"taskArns": [t.arn for t in (self.tasks if desiredStatus == "RUNNING" else lately)]}

    def describe_tasks(self, *, tasks: list[str], **_: Any) -> dict[str, Any]:
        running: list[tuple[Task, dict[str, Any]]] = [(task, {}) for task in self.tasks]
        ended = [
            (task, {"stoppedAt": self._time(tick), **self.reason, **task.reason})
            for task, tick in self.stopped
        ]
        shown = [(task, more) for task, more in (*running, *ended) if task.arn in tasks]
        known = [{"taskArn": t.arn, "taskDefinitionArn": t.definition, **more} for t, more in shown]
        return {"tasks": known}

    def _time(self, tick: int) -> datetime:
        return datetime.fromtimestamp(EPOCH_S + tick * TICK_S, UTC)

    def update_service(self, *, desiredCount: int, **_: Any) -> None:
        self.num_desired = desiredCount

    def update_task_protection(self, *, tasks: list[str], **_: Any) -> dict[str, Any]:
        assert len(tasks) <= 10, "ECS takes ten tasks at most"
        for task in self.tasks:
            task.is_protected |= task.arn in tasks
        return {"protectedTasks": [{"taskArn": arn} for arn in tasks], "failures": []}

    def start(self, num: int, *, is_ready: bool = False) -> None:
        for _ in range(num):
            ticks = 0 if is_ready else self.start_ticks or self.rng.randint(1, START_TICKS)
            task = Task(self.num_started, self.definition, self.now + ticks)
            if (fails_after := self.unfit.get(self.definition)) is not None:
                task.ready_tick, task.fails_tick = 2**62, self.now + fails_after
            self.tasks.append(task)
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
        for task in [task for task in self.tasks if task.fails_tick <= self.now]:
            self.fail(task)
        current = [task for task in self.tasks if task.definition == self.definition]
        most = self.num_desired * self.max_percent // 100
        fewest = math.ceil(self.num_desired * self.min_percent / 100)
        old = [task for task in self.tasks if task not in current]
        num_healthy = sum(task.ready_tick <= self.now for task in self.tasks)
        self._end(old, min(len(old), max(0, num_healthy - fewest)))
        self._end(current, max(0, len(current) - self.num_desired))
        room = max(most, self.num_desired) - len(self.tasks)
        self.start(max(0, min(room, self.num_desired - len(current))))

    def fail(self, task: Task) -> None:
        """A task ends by itself."""
        self.tasks.remove(task)
        self.stopped.append((task, self.now))

    def _end(self, tasks: list[Task], num: int) -> None:
        """Ends unprotected tasks, whichever."""
        exposed = [task for task in tasks if not task.is_protected]
        for task in self.rng.sample(exposed, min(num, len(exposed))):
            self.tasks.remove(task)
            if task.num_jobs:
                self.ended_with_jobs.append(task)
            if task.ready_tick > self.now and task.definition == self.definition:
                self.ended_starting.append(task)

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
