"""Gateways that work on operations in the small world, compared with their reference."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from contract.batches import LeaseLost
from contract.errors import BatchwayError
from contract.function_types import Wanted
from contract.operations import OperationKind, Operations, OperationsFull, OperationState, Step
from tests.oracle.reference_operations import Answer, Place

if TYPE_CHECKING:
    from tests.oracle.world import World

LEASE_S = 10.0
NO_OPERATION = "op-0-none"


@dataclass
class Clerk:
    """A gateway that took an operation. `handed`: jobs that it got to submit, not yet reported."""

    operation_id: str
    token: str
    handed: Step | None = None


class Clerks:
    """The gateways, also dead ones and those whose lease is over; the youngest last."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._operations = Operations(world.async_client, world.keys)
        self._there = world.reference.operations
        self._num = 0
        self.operation_ids: list[str] = []
        self.clerks: list[Clerk] = []

    def add(
        self,
        kind: OperationKind,
        wanted: Wanted,
        *,
        owner: str,
        tenant: str,
        repeats: str | None = None,
    ) -> None:
        self._num += 1
        operation_id = repeats or f"op-{self._num % 3}{self._num:031x}"
        terms = {"owner": owner, "tenant": tenant}
        said = self._both("add", operation_id, kind, wanted, **terms)
        if said is None and repeats is None:
            self.operation_ids.append(operation_id)

    def take(self, only: str = "") -> Clerk | None:
        self._num += 1
        token = f"{self._num:016x}"
        operation_id = self._both("take", token, lease_s=LEASE_S, only=only)
        if operation_id is None:
            return None
        self.clerks.append(Clerk(operation_id, token))
        return self.clerks[-1]

    def step(
        self,
        clerk: Clerk,
        *,
        num_failed: int = 0,
        gives_back: bool = False,
        loses_reply: bool = False,
        max_looks: int = 500,
        max_jobs: int = 20,
    ) -> OperationState | None:
        """Reports what the clerk was handed, as many of it failed, and works on. Returns the state;
        None where the lease is lost."""
        reported, clerk.handed = clerk.handed, None
        if reported is not None and reported.job_ids:
            num = len(reported.job_ids)
            failed = min(num_failed, num)
            reported = replace(
                reported,
                matched=reported.matched + num,
                done=reported.done + num - failed,
                failed=reported.failed + failed,
            )
        lease_s = 0.0 if gives_back else LEASE_S
        bounds: dict[str, Any] = {"lease_s": lease_s, "max_looks": max_looks, "max_jobs": max_jobs}
        known = None if reported is None else (_place(reported.cursor), _counts(reported))
        there = self._call("step", clerk.operation_id, clerk.token, reported=reported, **bounds)
        here = _told(
            lambda: self._there.step(clerk.operation_id, clerk.token, reported=known, **bounds)
        )
        is_step = isinstance(there, Step)
        self._compare("step", _answer(there) if is_step else there, here)
        self._heard("step", "LeaseLost" if not is_step else f"{there.state}")
        if not is_step:
            return None
        if there.job_ids and not loses_reply:
            clerk.handed = there
        state: OperationState = there.state
        if state is OperationState.COMPLETED:
            self._check_whole(clerk.operation_id)
        return state

    def stop(self, operation_id: str) -> None:
        self._both("stop", operation_id)

    def settle(self) -> None:
        """All gateways have died. Others end every operation."""
        self._world.pass_time(LEASE_S + 1)
        while (clerk := self.take()) is not None:
            while self.step(clerk) is OperationState.RUNNING:
                pass
        running = [e for e in self._there.entries.values() if e.state is OperationState.RUNNING]
        assert not running, "every operation ends"

    def compare(self, owners: tuple[str, ...]) -> None:
        """The records and lists in Redis are those of the reference."""
        keys, client = self._world.keys, self._world.client
        for operation_id, entry in self._there.entries.items():
            raw: Any = client.hgetall(keys.of("operation", operation_id))
            there = {name.decode(): value for name, value in raw.items()}
            fields = ("matched", "done", "failed", "lease", "finished")
            numbers = tuple(int(there.get(name, 0)) for name in fields)
            found = there["state"].decode(), there.get("token", b"").decode(), *numbers
            known = *entry.counts, entry.lease_ms, entry.finished_ms or 0
            assert found == (entry.state.value, entry.token, *known), operation_id
            assert _place(there["cursor"]) == entry.place, f"the cursor of {operation_id}"
        rows: Any = client.zrange(keys.of("operations_open"), 0, -1, withscores=True)
        open_ = {i: e for i, e in self._there.entries.items() if e.state is OperationState.RUNNING}
        known_open = {operation_id: entry.worked_ms for operation_id, entry in open_.items()}
        assert {name.decode(): int(at) for name, at in rows} == known_open, "open operations"
        for owner in owners:
            names: Any = client.zrevrange(keys.of("operations", owner), 0, -1)
            listed = [name.decode() for name in names]
            assert listed == self._there.of_owner(owner), f"the operations of {owner}"

    def _check_whole(self, operation_id: str) -> None:
        """A completed cancel has left out no job: the clock stands still, so nothing came since."""
        entry = self._there.entries[operation_id]
        if entry.kind is OperationKind.CANCEL:
            assert self._there.missed(entry) == [], "every job that was meant has ended"

    def _both(self, name: str, *args: Any, **options: Any) -> Any:
        there = self._call(name, *args, **options)
        here = _told(lambda: getattr(self._there, name)(*args, **options))
        self._compare(name, there, here)
        is_id = name == "take" and there is not None
        self._heard(name, "an operation" if is_id else str(there))
        return there

    def _compare(self, name: str, there: Any, here: Any) -> None:
        assert there == here, f"operation_{name}: Redis said {there!r}, the reference {here!r}"

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        method: Callable[..., Awaitable[Any]] = getattr(self._operations, name)

        async def run() -> Any:
            try:
                return await method(*args, **options)
            except (LeaseLost, OperationsFull) as error:
                return type(error).__name__

        self._world.hold_clock()
        return self._world.loop.run_until_complete(run())

    def _heard(self, name: str, kind: str) -> None:
        self._world.replies[f"operation_{name} {kind}"] += 1
        self._world.after_step()


def _told(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BatchwayError as error:
        return type(error).__name__


def _counts(step: Step) -> tuple[int, int, int]:
    return step.matched, step.done, step.failed


def _place(cursor: bytes) -> Place:
    if cursor in (b"", b"end"):
        return None
    created_ms, last_id = msgspec.msgpack.decode(cursor)
    return int(created_ms), last_id


def _answer(step: Step) -> Answer:
    return step.state, _counts(step), step.job_ids, bool(step.cursor), _place(step.cursor)
