"""Operations on many jobs: which jobs are meant, who works on them, and when they end."""

from typing import Any

import pytest

from contract.function_types import Wanted
from contract.jobs import JobStatus
from contract.operations import OperationKind, OperationProgress
from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import LANES, LEASE_S, World, name_of

WANTED = {
    "all": Wanted(),
    "batch": Wanted(lanes=frozenset(["batch"])),
    "red": Wanted(metadata={"colour": "red"}),
    "n": Wanted(model="n"),
    "failed": Wanted(statuses=frozenset([JobStatus.FAILED])),
    "error": Wanted(error_code="engine_error"),
    "since0": Wanted(created_after_ms=1_700_000_000_000),
    "since2": Wanted(created_after_ms=1_700_000_002_000),
    "before0": Wanted(created_before_ms=1_700_000_000_000),
    "before2": Wanted(created_before_ms=1_700_000_002_000),
    "between": Wanted(created_after_ms=1_700_000_000_000, created_before_ms=1_700_000_002_000),
}


class OperationCalls(Calls):
    """Gateways that work on operations."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.step_before: OperationProgress | None = None

    def some(self) -> None:
        """Eight jobs of t, two in each second: t0 failed, t1 succeeded, t2 and t3 run; u1 waits."""
        world = self._world
        for i in range(8):
            metadata, callback = {"colour": "red"} if i % 2 else {}, "a" if i < 2 else ""
            lane = LANES[i % 3 == 2]
            world.submit(f"t{i}", lane=lane, metadata=metadata, callback=callback)
            world.pass_time(i % 2)
        assert world.claim(jobs=2, lanes=LANES[:1]) == ["t0", "t1"]
        world.append("t0", 1, "failed")
        world.append("t1", 1, "succeeded")
        world.claim(jobs=1)
        world.submit("u1")

    def add(
        self,
        name: str,
        wanted: str = "all",
        kind: str = "cancel",
        owner: str = "t",
        tenant: Any = "t",
    ) -> Any:
        terms: dict[str, Any] = {"owner": owner, "tenant": tenant or ""}
        call = self._world.operations.add(name, OperationKind(kind), WANTED[wanted], **terms)
        return self._world.told(call)

    def take(self, token: int = 1, only: str = "") -> Any:
        return self._world.run(self._world.operations.take(str(token), lease_s=LEASE_S, only=only))

    def step(self, name: str = "a", token: int = 1, **terms: Any) -> str:
        """State, matched, done, failed and the jobs of a step, or the error."""
        terms.setdefault("lease_s", LEASE_S)
        said = self._world.told(self._world.operations.step(name, str(token), **terms))
        if not isinstance(said, OperationProgress):
            return str(said)
        self.step_before = said
        counts = f"{said.matched}/{said.done}/{said.failed}"
        return " ".join([str(said.state), counts, *map(name_of, said.job_ids)])

    def report(self, matched: int, done: int, failed: int, **terms: Any) -> str:
        """A step that reports the jobs of the one before."""
        assert self.step_before is not None
        before = OperationProgress(
            self.step_before.state, matched, done, failed, (), self.step_before.cursor
        )
        return self.step(reported=before, **terms)

    def finish(self, name: str = "a", **terms: Any) -> str:
        """Steps until it has ended."""
        self.take(1, name)
        while (said := self.step(name, **terms)).startswith("running"):
            pass
        return said

    def back(self, name: str) -> None:
        self._world.run(self._world.operations.give_back(name, "1"))

    def next(self, num: int) -> list[str]:
        """The operations that are taken and given back one after another."""
        names = []
        for _ in range(num):
            names.append(str(self.take()))
            self.back(names[-1])
        return names

    def stop(self, name: str = "a") -> Any:
        return self._world.run(self._world.operations.stop(name))

    def of(self, name: str, *fields: str) -> list[Any]:
        return [self._world.redis("HGET", f"operation:{name}", field) for field in fields]

    def ended(self, status: str = "cancelled") -> list[str]:
        """The jobs that have ended so."""
        names = [f"t{i}" for i in range(8)] + ["u1"]
        return [name for name in names if self._world.status(name) == status]

    def give_up(self) -> None:
        """All messages that are due."""
        for taken in self._world.take():
            self._world.done(taken, "dead")


@pytest.fixture
def calls(world: World) -> OperationCalls:
    return OperationCalls(world)


@pytest.mark.parametrize("bounds", ["max_looks=1", "max_looks=500 max_jobs=20", "max_jobs=2"])
@scripts("""
all: add a -> t2 t3 t4 t5 t6 t7
of all tenants: add a tenant= -> t2 t3 t4 t5 t6 t7 u1
of another: add a tenant=u -> u1
a lane: add a batch -> t2 t5
a colour: add a red -> t3 t5 t7
a model: add a n -> -
later ones: add a since2 -> t6 t7
earlier ones: add a before2 -> t2 t3
those between: add a between -> t2 t3
""")
def test_what_is_meant_is_cancelled_once(calls: Calls, script: list[str], bounds: str) -> None:
    """In steps of any size."""
    add, _, expected = script[0].partition(" -> ")
    num = len(expected.replace("-", "").split())
    calls.run(
        ["some", add, f"finish a {bounds} -> completed {num}/{num}/0", f"ended -> {expected}"]
    )
    calls.run([f"step -> completed {num}/{num}/0", "redis ZCARD operations_open -> 0"])


@scripts("""
all, until they are reported
  add a all replay; take; step; step -> running 0/0/0 t1 t0
  report 2 1 1 -> completed 2/1/1
  report 9 9 9 -> completed 2/1/1
a status: add a failed replay; take; step -> running 0/0/0 t0
an error: add a error replay; take; step -> running 0/0/0 t0
a lane: add a batch replay; take; step -> completed 0/0/0
page by page
  add a all replay; take; step max_jobs=1 -> running 0/0/0 t1
  report 1 1 0 max_jobs=1 -> running 1/1/0 t0
  step max_jobs=1 -> running 1/1/0 t0
  step max_jobs=0 -> running 1/1/0
""")
def test_ended_jobs_are_handed_out_to_be_submitted_again(calls: Calls, script: list[str]) -> None:
    calls.run(["some", *script])


@scripts("""
all: add a all replay_callbacks; finish max_looks=1 -> completed 2/2/0
a status: add a failed replay_callbacks; finish -> completed 1/1/0
a colour: add a red replay_callbacks; finish -> completed 1/1/0
later ones: add a since0 replay_callbacks; finish -> completed 0/0/0
earlier ones: add a before2 replay_callbacks; finish -> completed 2/2/0
earlier ones, of then: add a before0 replay_callbacks; finish -> completed 0/0/0
of another: add a all replay_callbacks tenant=u; finish -> completed 0/0/0
they are due then: add a failed replay_callbacks; finish; due -> t0:failed
""")
def test_dead_letters_are_replayed(calls: Calls, script: list[str]) -> None:
    """Not what was delivered."""
    calls.run(["some; give_up; submit t9 callback=b; cancel t9; due -> t9:cancelled", *script])


@scripts("""
by a lease, which each step renews
  step -> LeaseLost
  take -> a
  take 2 -> None
  take 2 a -> None
  step a 2 -> LeaseLost
  pass_time 9.999; step max_jobs=1; pass_time 9.999; step max_jobs=1 -> running 2/2/0
  pass_time 10; step -> LeaseLost
  take 2 -> a
  step -> LeaseLost
it may be given back
  take; step lease_s=0 max_jobs=0 -> running 0/0/0
  step -> LeaseLost
  take 2; step a 2 -> completed 6/6/0
one that has ended is not taken: take; step lease_s=0; take 2; take 2 a -> None
one that is stopped goes no further
  take; step max_jobs=2; stop -> cancelled
  of a finished -> 1700000004000
  pass_time 1; stop -> cancelled
  of a finished -> 1700000004000
  step -> cancelled 2/2/0
  ended -> t6 t7
  stop b -> None
  redis ZCARD operations_open -> 0
one that has ended is not stopped: take; step; stop -> completed
another: take 1 b -> None
""")
def test_one_gateway_at_a_time_works_on_an_operation(calls: Calls, script: list[str]) -> None:
    calls.run(["some; add a", *script])


@scripts("""
the one that was worked on longest ago comes first, also where the clock stands still
  add c; pass_time 0.001; add b; pass_time 0.001; add a; next 8 -> c b a c b a c b
  take 1 b -> b
a tenant's open ones have a bound
  add z owner=u; add a; add b; add c; add d; add e; add f; add g; add h; add i; add j; add k
  add l; add m; add n
  add o; add p -> None
  add q -> OperationsFull
  add a -> None
  add y owner=u -> None
  stop a; add a; of a state -> cancelled
  add q -> None
they are listed for a week after they may have ended
  add a; redis TTL operations:t -> 691200
  redis TTL operation:a -> -1
  stop a; redis TTL operation:a -> 604800
  pass_time 691200; add b; redis ZRANGE operations:t 0 -1 -> b
one that waits for room is given up after a day
  run_job t0 retention_s=999999; add a all replay; pass_time 86400; take; step -> running 0/0/0 t0
  pass_time 0.001; step -> expired 0/0/0 t0
  redis ZCARD operations_open -> 0
jobs of its own moment are meant, and later ones are not
  submit t0; add a; submit t1; pass_time 0.001; submit t2; finish -> completed 2/2/0
  status t2 -> queued
the calls of flows are left to their flows
  submit t0; submit t1 parent=job-0-t0; add a; finish -> completed 1/1/0
  status t1 -> queued
""")
def test_operations_take_turns_and_end(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@pytest.mark.parametrize("num_looks", [1, 2, 7, 500])
def test_jobs_of_one_moment_are_all_met(calls: Calls, num_looks: int) -> None:
    """However many a step reads, and if the job where it stopped has been forgotten since."""
    names = [f"t{i:02}" for i in range(20)]
    looks = f"max_looks={num_looks}"
    calls.run([f"submit {' '.join(names)}; add a; take; step a {looks}"])
    for name in names:
        calls.do(f"delete {name}")
    calls.run([f"finish a {looks} -> completed 20/20/0"])
