"""A seeded random walk that exercises the outbox: few jobs, many deliveries."""

import random
from collections.abc import Callable

from contract.callbacks import OutboxState
from contract.outbox import Outcome, Taken
from tests.oracle.postmen import NOBODY
from tests.oracle.world import CALLBACKS, LANES, TENANTS, WORKERS, World

_OUTCOMES: tuple[Outcome, ...] = ("delivered", "retry", "dead", "dead")


class PostalWalk:
    """Draws one step after another."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._steps: list[tuple[int, Callable[[], None]]] = [
            (12, self._submit),
            (8, self._claim),
            (16, self._append),
            (3, self._cancel),
            (3, self._release),
            (3, self._heartbeat),
            (1, lambda: world.sweep()),
            (14, lambda: world.postmen.take(self._rng.choice([1, 1, 3, 50]))),
            (8, self._start),
            (5, lambda: world.postmen.renew(self._taken())),
            (14, self._done),
            (12, self._replay),
            (2, lambda: world.postmen.dead(self._rng.choice(TENANTS))),
            (4, lambda: world.pass_time(self._rng.choice([1, 1, 3, 11]))),
        ]

    def step(self) -> None:
        weights = [weight for weight, _ in self._steps]
        self._rng.choices([step for _, step in self._steps], weights)[0]()

    def _submit(self) -> None:
        callback = self._rng.choice([None, *CALLBACKS, CALLBACKS[1]])
        self._world.submit(self._rng.choice(TENANTS), LANES[0], 12, 600, callback=callback)

    def _claim(self) -> None:
        worker = self._rng.choice(WORKERS)
        self._world.claim(worker, 4, 1000, is_idle=False, loses_reply=False)

    def _append(self) -> None:
        worker = self._rng.choice([w for w in WORKERS if self._world.beliefs[w]] or WORKERS)
        held = sorted(self._world.beliefs[worker])[-4:]
        job_id = self._rng.choice(held or ["job-0-none"])
        fin = self._rng.choice(["", "", "", "succeeded", "failed"])
        num_tokens = self._rng.choice([0, 1, 2])
        self._world.append(worker, job_id, num_tokens, fin, shift=0, loses_reply=False)

    def _cancel(self) -> None:
        if self._world.job_ids:
            self._world.cancel(self._rng.choice(self._world.job_ids[-4:]), TENANTS[0])

    def _release(self) -> None:
        for worker in WORKERS:
            for job_id in sorted(self._world.beliefs[worker])[-1:]:
                self._world.release(worker, job_id, "drain")

    def _heartbeat(self) -> None:
        self._world.heartbeat(self._rng.choice(WORKERS))

    def _taken(self) -> Taken:
        """Mostly one of the messages taken last; sometimes an old one, or none."""
        taken = self._world.postmen.taken
        if not taken or self._rng.random() < 0.06:
            return NOBODY
        return self._rng.choice(taken[-4:] if self._rng.random() < 0.9 else taken)

    def _start(self) -> None:
        """Often a destination that got another message since the relay took one."""
        entries = self._world.reference.outbox.entries
        taken = [
            t for t in self._world.postmen.taken[-20:] if t.attempt == entries[t.job_id].attempt
        ]
        late = [t for t in taken if entries[t.job_id].taken not in (None, entries[t.job_id].number)]
        is_late = late and self._rng.random() < 0.5
        self._world.postmen.start(self._rng.choice(late) if is_late else self._taken())

    def _done(self) -> None:
        outcome = self._rng.choice(_OUTCOMES)
        self._world.postmen.done(self._taken(), outcome, self._rng.choice([0, 2, 20]))

    def _replay(self) -> None:
        """Each state equally often, and one of its records; mostly for its own tenant."""
        entries = self._world.reference.outbox.entries
        state = self._rng.choice(list(OutboxState))
        job_ids = [i for i, entry in entries.items() if entry.state is state]
        job_id = self._rng.choice(job_ids or ["job-0-none"])
        is_own = job_id in entries and self._rng.random() < 0.8
        tenant = entries[job_id].tenant if is_own else self._rng.choice(TENANTS)
        self._world.postmen.replay(job_id, tenant)
