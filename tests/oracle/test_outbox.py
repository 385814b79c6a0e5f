"""Messages of callbacks: when they are posted, who may send them, and what becomes of them."""

from typing import Any

import pytest

from contract.outbox import DoneVerdict, Taken
from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import LEASE_S, World, job_id, name_of
from workers.callbacks.rq_runner import AttemptQueue


class OutboxCalls(Calls):
    """Deliverers, by the first attempt that was taken of a job's messages."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.taken: dict[str, Taken] = {}

    def ended(self, *names: str, callback: str = "a") -> None:
        """Jobs whose ends are due."""
        for name in names:
            self._world.submit(name, callback=callback)
            self._world.cancel(name)

    def take(self, room: int = 50, per_target: int = 2) -> list[str]:
        found = {name_of(taken.job_id): taken for taken in self._world.take(room, per_target)}
        self.taken = found | self.taken
        return sorted(found)

    def tenants(self, room: int) -> list[str]:
        """Whose messages are taken."""
        return [name[0] for name in self.take(room)]

    def again(self, name: str) -> None:
        """Another attempt holds the message."""
        [self.taken[name]] = self._world.take()

    def begin(self, name: str) -> str:
        record = self._world.run(self._world.outbox.start(self.taken[name], lease_s=LEASE_S))
        return str(record and record.kind)

    def renew(self, name: str) -> bool:
        return self._world.run(self._world.outbox.renew(self.taken[name], lease_s=LEASE_S))

    def done(self, name: str, outcome: str = "delivered", delay_s: float = 0) -> DoneVerdict:
        return self._world.done(self.taken[name], outcome, delay_s)

    def out(self, name: str, *fields: str) -> list[Any]:
        return [
            self._world.redis("HGET", f"out:{job_id(name)}", each) for each in fields or ["state"]
        ]

    def replay(self, name: str, tenant: str = "") -> Any:
        return self._world.run(self._world.outbox.replay(job_id(name), tenant or name[0]))

    def dead(self, tenant: str, **terms: Any) -> list[str]:
        letters = self._world.run(self._world.outbox.dead(tenant, **terms))
        return [name_of(letter.record.job_id) for letter in letters]

    def watched(self) -> tuple[int, int]:
        """Messages that are due, and dead ones."""
        found = self._world.run(self._world.functions.watch("m", ()))
        return found.num_due_callbacks, found.num_dead_callbacks


@pytest.fixture
def calls(world: World) -> OutboxCalls:
    return OutboxCalls(world)


@scripts("""
the start once, each second token, and the end
  submit t1 callback=talks; due -> -
  claim; due -> t1:started
  append t1; due -> -
  append t1; due -> t1:progress
  append t1 3; due -> t1:progress
  append t1 0; due -> -
  release t1; claim; due -> -
the newest replaces one that waits, and no progress comes with the end
  submit t1 callback=talks; claim; append t1 2; append t1 1; append t1 1 succeeded
  due -> t1:succeeded
the end alone
  submit t1 callback=a; submit t2; claim; append t1 4; due -> -
  cancel t1; cancel t2; due -> t1:cancelled
the first claim is a start, no later one
  submit t1 callback=talks; claim; release t1; due -> t1:started
  claim; due -> -
it says what happened
  submit t1 callback=a; claim; append t1 2 failed
  out t1 kind code number failures tokens -> failed engine_error 1 0 2
  out t1 prompt_tokens tenant lane -> 3 t interactive
""")
def test_messages_are_posted_as_a_callback_asks(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
nothing: begin t1 -> cancelled
it is renewed: pass_time 9; renew t1; pass_time 9; take -> -
it is begun: pass_time 9; begin t1; pass_time 9; take -> -
it is visited in time: pass_time 9.999; take -> -
its lease lapses: pass_time 10; begin t1 -> cancelled
it has lapsed, and is renewed: pass_time 10; renew t1 -> True
it has lapsed, and is done: pass_time 10; done t1 -> OK
another takes it: pass_time 10; take -> t1
it is another's, to begin: pass_time 10; take; begin t1 -> None
it is another's, to renew: pass_time 10; take; renew t1 -> False
it is another's, to end: pass_time 10; take; done t1 -> FENCED
it was delivered: done t1; done t1 -> OK
it was delivered, to begin: done t1; begin t1 -> None
it was delivered, to renew: done t1; renew t1 -> False
it was delivered, and is dead: done t1; done t1 dead; out t1 -> delivered
it is to be tried again: done t1 retry 5; done t1 retry; out t1 state failures -> due 1
its record is gone, to begin: unsound; redis DEL out:job-0-t1; begin t1 -> None
its record is gone, to end: unsound; redis DEL out:job-0-t1; done t1 -> GONE
its record is gone, to take: redis DEL out:job-0-t1; pass_time 10; unsound; take -> -
""")
def test_one_attempt_holds_a_message(calls: Calls, script: list[str]) -> None:
    calls.run(["ended t1; take -> t1", *script])


@scripts("""
an end that was delivered: done t1; out t1 state callback -> delivered None
a start that was delivered: done t2; out t2 -> idle
an end that was given up: done t1 dead; out t1 -> dead
a start that was given up: done t2 dead; out t2 -> idle
both are tried again
  done t1 retry 5; done t2 retry 5; pass_time 4.999; take -> -
  pass_time 0.001; take -> t1 t2
  out t1 failures attempt -> 1 2
outcomes are counted: done t1 dead; done t2; redis HMGET deliveries delivered dead -> 1 1
one that was delivered is kept for a day: done t1; redis TTL out:job-0-t1 -> 86400
others for a week: done t1 dead; redis TTL out:job-0-t1 -> 604800
letters are kept for a week: done t1 dead; redis TTL dead:t -> 604800
an attempt sends the newest, and ends what it sent
  append t2 2; take -> -
  begin t2 -> progress
  done t2 -> OK
  append t2 2; again t2; append t2 1 succeeded; renew t2; done t2 dead -> SUPERSEDED
  take -> t2
an attempt that began before is no delivery of a newer message
  append t2 1 succeeded; done t2 -> SUPERSEDED
  due -> t2:succeeded
""")
def test_an_end_is_kept_and_progress_is_not(calls: Calls, script: list[str]) -> None:
    """`t1` has ended, `t2` has begun."""
    calls.run(["ended t1; submit t2 callback=talks; claim; take -> t1 t2", *script])


@scripts("""
a destination has a bound of messages in flight, and delays no other
  ended t1 t2 t3 t4; ended t5 callback=b; take -> t1 t2 t5
  take -> -
  ended t6; take -> -
  done t1; take -> t3
  pass_time 10; take 50 1; watched -> 3 0
a tenant has four times the places that remain
  ended u0 u1; ended t0 callback=c0; ended t1 callback=c1; ended t2 callback=c2
  ended t3 callback=c3
  ended t4 callback=c4; ended t5 callback=c5; ended t6 callback=c6; ended t7 callback=c7
  pass_time 1
  tenants 4 -> t t u
  tenants 3 -> t u
  tenants 1 -> -
  tenants 2 -> t
  tenants 2 -> -
  tenants 50 -> t t t t
  pass_time 10; tenants 2 -> t u
one place is for a tenant without any
  ended t1 t2; take 1 -> t1
  take 1 -> -
  ended u1 callback=b; take 1 -> u1
  take 0 -> -
messages that wait are counted: ended t1 t2; ended t3 callback=b; ended u1; take 1; watched -> 3 0
letters are listed the youngest first
  ended t1 t2; ended u1 callback=b; take; done t1 dead; pass_time 1; done u1 dead; pass_time 1
  done t2 dead
  dead t -> t2 t1
  dead t limit=1 -> t2
  dead t job_id=job-0-t1 -> t1
  dead t job_id=job-0-u1 -> -
  dead t before_ms=1700000000001 -> t1
  dead t before_ms=1700000000000 -> -
  watched -> 0 3
  pass_time 604801; watched -> 0 0
  ended t3; take; done t3 dead; unsound; redis ZCARD dead:t -> 1
""")
def test_who_is_sent_next(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
it waits: replay t1 -> due
it is in flight: take; replay t1 -> taken
it was delivered: take; done t1; replay t1 -> delivered
there is none: unsound; redis DEL out:job-0-t1; replay t1 -> None
another's: take; done t1 dead; replay t1 u -> None
it was given up, and is dead no more
  take; done t1 retry; again t1; done t1 dead; watched -> 0 1
  dead t -> t1
  dead u -> -
  replay t1 -> due
  dead t -> -
  watched -> 1 0
  out t1 state failures -> due 0
  due -> t1:cancelled
""")
def test_a_dead_letter_is_replayed_for_its_tenant(calls: Calls, script: list[str]) -> None:
    calls.run(["ended t1", *script])


@pytest.mark.parametrize("seconds", [1, LEASE_S / 2, LEASE_S - 1])
def test_a_queue_slower_than_leases_delivers_all_the_same(
    calls: OutboxCalls, world: World, seconds: float
) -> None:
    """RQ performs one attempt in so many seconds, and its queue has room for eight."""
    names = [f"{tenant}{number}" for tenant in "tuv" for number in range(8)]
    calls.ended(*names)
    attempts = AttemptQueue(world.client, "test", "a key")
    delivered = set[str]()
    for _ in range(3 * len(names)):
        if room := 8 - attempts.num_waiting():
            attempts.put(world.take(room, per_target=8))
        raw: Any = world.client.lpop(attempts.queue.key)
        if raw is not None:
            id_, _, attempt = raw.decode().removeprefix("cb-").rpartition("-")
            taken = Taken(id_, int(attempt))
            world.pass_time(seconds)
            if world.run(world.outbox.start(taken, lease_s=LEASE_S)):
                world.done(taken, "delivered")
                delivered.add(name_of(taken.job_id))
    assert delivered == set(names)
