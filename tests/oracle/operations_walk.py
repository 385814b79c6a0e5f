"""A seeded random walk of operations on many jobs: cancels and replays by filter, by gateways that
die, lose replies and come back late."""

import random
from collections.abc import Callable

from contract.function_types import Wanted
from contract.jobs import JobStatus
from contract.operations import OperationKind
from tests.oracle.clerks import NO_OPERATION, Clerk
from tests.oracle.world import CALLBACKS, COLOURS, LANES, TENANTS, WORKERS, World

_DAY_S = 90_000
_ENDS = (JobStatus.CANCELLED, JobStatus.FAILED, JobStatus.SUCCEEDED)


class OperationsWalk:
    """Draws one step after another."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._clerks = world.clerks
        self._rng = random.Random(seed)
        self._days = self._rng.choice([0, 0, 1])  # that may pass
        self._steps: list[tuple[int, Callable[[], None]]] = [
            (30, self._submit),
            (8, self._claim),
            (10, self._append),
            (3, self._cancel),
            (2, self._delete),
            (2, lambda: world.reprioritise(self._job_id(), self._tenant(), self._lane())),
            (3, self._give_up_letters),
            (12, self._add),
            (14, self._take),
            (34, self._step),
            (2, self._stop),
            (1, world.sweep),
            (7, lambda: world.pass_time(self._rng.choice([0.001, 0.5, 1, 4, 11]))),
            (1, self._pass_a_day),
        ]

    def step(self) -> None:
        weights = [weight for weight, _ in self._steps]
        self._rng.choices([step for _, step in self._steps], weights)[0]()

    def _flip(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _tenant(self) -> str:
        return self._rng.choice(TENANTS)

    def _lane(self) -> str:
        return self._rng.choice(LANES)

    def _job_id(self) -> str:
        return self._rng.choice([*self._world.job_ids[-8:], "job-0-none"])

    # --- jobs

    def _submit(self) -> None:
        """Several at one moment."""
        for _ in range(self._rng.choice([1, 1, 2, 4])):
            callback = self._rng.choice([None, CALLBACKS[0]])
            terms = {"colour": self._rng.randrange(len(COLOURS)), "callback": callback}
            self._world.submit(self._tenant(), self._lane(), 8, 600, **terms)  # type: ignore[arg-type]

    def _claim(self) -> None:
        self._world.heartbeat(WORKERS[0])
        self._world.claim(WORKERS[0], 4, 1000, is_idle=False, loses_reply=False)

    def _append(self) -> None:
        held = sorted(self._world.beliefs[WORKERS[0]])[-4:]
        fin = self._rng.choice(["", "succeeded", "failed"])
        job_id = self._rng.choice(held or ["job-0-none"])
        self._world.append(WORKERS[0], job_id, 1, fin, shift=0, loses_reply=False)

    def _cancel(self) -> None:
        self._world.cancel(self._job_id(), self._tenant())

    def _delete(self) -> None:
        self._world.delete(self._job_id(), self._tenant())

    def _give_up_letters(self) -> None:
        """Some at one moment, as when a receiver is gone."""
        postmen = self._world.postmen
        before = len(postmen.taken)
        postmen.take(self._rng.choice([1, 50]))
        for taken in postmen.taken[before:]:
            postmen.done(taken, "dead", 0)

    def _pass_a_day(self) -> None:
        """At most once: lists that are kept for a week stay whole."""
        if self._days:
            self._days -= 1
            self._world.pass_time(_DAY_S)

    # --- operations

    def _operation_id(self) -> str:
        return self._rng.choice([*self._clerks.operation_ids[-4:], NO_OPERATION])

    def _add(self) -> None:
        kind = self._rng.choice([OperationKind.CANCEL, *OperationKind])
        owner = self._tenant()
        of_all = kind is not OperationKind.REPLAY_CALLBACKS and self._flip(0.4)
        known = self._operation_id()
        repeats = known if known != NO_OPERATION and self._flip(0.15) else None
        tenant = "" if of_all else self._tenant()
        self._clerks.add(kind, self._wanted(kind), owner=owner, tenant=tenant, repeats=repeats)

    def _wanted(self, kind: OperationKind) -> Wanted:
        """Often all; a letter's filters are its kind's."""
        rng, now_ms = self._rng, self._world.reference.now_ms
        statuses = frozenset(rng.sample(_ENDS, 1)) if self._flip(0.3) else frozenset()
        if kind is OperationKind.REPLAY_CALLBACKS:
            return Wanted(statuses=statuses)
        return Wanted(
            statuses=statuses if kind is OperationKind.REPLAY else frozenset(),
            lanes=frozenset([self._lane()] if self._flip(0.2) else []),
            created_after_ms=now_ms - rng.choice([500, 1000, 5000]) if self._flip(0.2) else 0,
            created_before_ms=now_ms - rng.choice([0, 500, 1000]) if self._flip(0.2) else 0,
            metadata=rng.choice(COLOURS) if self._flip(0.3) else {},
        )

    def _take(self) -> None:
        self._clerks.take(self._operation_id() if self._flip(0.3) else "")

    def _clerk(self) -> Clerk:
        """Mostly one of the youngest; sometimes with a token that it never had."""
        clerks = self._clerks.clerks
        if not clerks or self._flip(0.04):
            return Clerk(self._operation_id(), "0" * 16)
        return self._rng.choice(clerks[-3:] if self._flip(0.9) else clerks)

    def _step(self) -> None:
        self._clerks.step(
            self._clerk(),
            num_failed=self._rng.choice([0, 0, 1]),
            gives_back=self._flip(0.15),
            loses_reply=self._flip(0.15),
            max_looks=self._rng.choice([1, 2, 5, 500]),
            max_jobs=self._rng.choice([0, 1, 2, 20]),
        )

    def _stop(self) -> None:
        self._clerks.stop(self._operation_id())
