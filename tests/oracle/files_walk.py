"""A seeded random walk that exercises files and batches, and the messages of their ends."""

import random
from collections.abc import Callable

from contract.batches import BatchStatus, Part
from tests.oracle.feeders import LEASE_S, NO_BATCH, NO_FILE
from tests.oracle.world import CALLBACKS, TENANTS, World

_NEXT = {  # the status that a feeder records at each status
    BatchStatus.VALIDATING: (*[BatchStatus.IN_PROGRESS] * 4, BatchStatus.FAILED),
    BatchStatus.IN_PROGRESS: (*[BatchStatus.FINALIZING] * 4, BatchStatus.FAILED),
    BatchStatus.FINALIZING: (BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.IN_PROGRESS),
    BatchStatus.CANCELLING: (BatchStatus.CANCELLED,),
}


class FilesWalk:
    """Draws one step after another."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._feeders = world.feeders
        self._rng = random.Random(seed)
        self._most = self._rng.choice([0, 60])  # bytes of a tenant
        self._steps: list[tuple[int, Callable[[], None]]] = [
            (4, self._begin_file),
            (14, self._add_file),
            (8, self._drop),
            (6, self._delete_due),
            (8, self._add_batch),
            (6, self._cancel),
            (12, self._take),
            (36, self._save),
            (4, lambda: world.postmen.take(self._rng.choice([1, 50]))),
            (3, self._deliver),
            (2, self._replay),
            (1, world.sweep),
            (8, lambda: world.pass_time(self._rng.choice([1, 1, 3, 11, 70]))),
        ]

    def step(self) -> None:
        weights = [weight for weight, _ in self._steps]
        self._rng.choices([step for _, step in self._steps], weights)[0]()

    def _flip(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _file_id(self) -> str:
        """Mostly one of the youngest, sometimes none."""
        return self._rng.choice([*self._feeders.file_ids[-6:], NO_FILE])

    def _batch_id(self) -> str:
        return self._rng.choice([*self._feeders.batch_ids[-5:], NO_BATCH])

    def _begin_file(self) -> None:
        """Of the file that is added next, or of one that never is."""
        self._feeders.begin_file(is_lost=self._flip(0.4), upload_s=self._rng.choice([3, 60]))

    def _add_file(self) -> None:
        repeats = self._file_id() if self._flip(0.3) else None
        files = self._world.reference.files.files
        tenant = files[repeats].tenant if repeats in files else self._rng.choice(TENANTS)
        self._feeders.add_file(
            tenant,
            self._rng.choice([0, 5, 30]),
            repeats=None if repeats == NO_FILE else repeats,
            lifetime_s=self._rng.choice([4, 30, 600]),
            max_tenant_bytes=self._most,
        )

    def _drop(self) -> None:
        self._feeders.drop(self._file_id(), self._rng.choice(TENANTS))

    def _delete_due(self) -> None:
        self._feeders.delete_due(self._rng.choice([1, 3, 100]), is_lost=self._flip(0.4))

    def _add_batch(self) -> None:
        repeats = self._batch_id() if self._flip(0.15) else None
        self._feeders.add_batch(
            self._rng.choice(TENANTS),
            repeats=None if repeats == NO_BATCH else repeats,
            window_s=self._rng.choice([60, 86_400]),
            callback=self._rng.choice([None, CALLBACKS[0]]),
            max_open=self._rng.choice([0, 3]),
        )

    def _cancel(self) -> None:
        batch_id = self._batch_id()
        record = self._world.reference.batches.records.get(batch_id)
        is_own = record is not None and self._flip(0.7)
        tenant = record.batch.tenant if record and is_own else self._rng.choice(TENANTS)
        self._feeders.cancel(batch_id, tenant)

    def _take(self) -> None:
        self._feeders.take(
            self._rng.choice([0, 1, 2, 9]),
            in_progress=self._flip(0.5),
            max_more=self._rng.choice([0, 0, 1]),
            repeats=self._flip(0.2),
        )

    def _save(self) -> None:
        """Mostly what a feeder records next of a batch that it took lately."""
        rng, held = self._rng, self._feeders.held
        records = self._world.reference.batches.records
        now_ms = self._world.reference.now_ms
        live = [(i, t) for i, t in held if records[i].token == t and records[i].lease_ms > now_ms]
        some = live[-6:] if live and self._flip(0.8) else held[-6:]
        batch_id, token = rng.choice(some or [(NO_BATCH, "0" * 16)])
        known = records[batch_id].batch.status if batch_id in records else None
        status = expected = None
        if self._flip(0.6):
            expected = known if self._flip(0.85) else rng.choice(list(BatchStatus))
            nexts = _NEXT.get(known) if known and self._flip(0.9) else None
            status = rng.choice(nexts or list(BatchStatus))
            expected = expected if self._flip(0.7) else None
        number = rng.randint(0, 3)
        part = Part(token, rng.randint(0, 64), rng.randint(0, 9), 7, 0, self._flip(0.2))
        self._feeders.save(
            batch_id,
            token,
            lease_s=rng.choice([LEASE_S] * 5 + [0]),
            expected=expected,
            status=status,
            part=rng.choice([None, None, None, (number, part), (number, part), (number, None)]),
            fields={"completed": rng.randint(0, 99), "total": 99} if self._flip(0.4) else {},
        )

    def _deliver(self) -> None:
        for taken in self._world.postmen.taken[-1:]:
            self._world.postmen.start(taken)
            outcome = self._rng.choice(["delivered", "retry", "dead"])
            self._world.postmen.done(taken, outcome, 0)  # type: ignore[arg-type]

    def _replay(self) -> None:
        self._world.postmen.replay(self._batch_id(), self._rng.choice(TENANTS))
