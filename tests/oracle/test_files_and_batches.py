"""Files and batches: what is recorded, for whom, until when, and who may write to a batch.

The first letter of a name is the tenant. Files live for 60 s, and a feeder's lease lasts 10 s.
"""

from typing import Any

import pytest

from contract.api_keys import KeyTerms
from contract.batches import BatchStatus, NewBatch, Part
from contract.files import StoredFile
from contract.jobs import Endpoint
from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import CALLBACKS, LEASE_S, World

PART = Part("0" * 16, 5, 1, 7, 0, False)


class FileCalls(Calls):
    """Callers of files and batches, feeders of batches."""

    def add(self, name: str, num_bytes: int = 10, most: int = 0) -> str:
        """'new', when it was created and expires in s from now; or the error."""
        file = StoredFile(
            id=name, tenant=name[0], num_bytes=num_bytes, purpose="batch", filename="ä b"
        )
        found = self._world.told(self._world.files.add(file, lifetime_s=60, max_tenant_bytes=most))
        if isinstance(found, str):
            return found
        now_ms = self._world.now_ms
        return f"{(found.created_ms - now_ms) / 1000} {(found.expires_ms - now_ms) / 1000}"

    def begin(self, name: str, seconds: float) -> None:
        self._world.run(self._world.files.begin(name, upload_s=seconds))

    def drop(self, name: str, tenant: str = "") -> bool:
        return self._world.run(self._world.files.drop(name, tenant))

    def files(self, tenant: str, after: str = "") -> Any:
        """Two of the tenant's, the oldest first; then the bytes of all."""
        terms: dict[str, Any] = {"purpose": "", "is_oldest_first": True, "max_files": 2}
        page = self._world.run(self._world.files.page(tenant, after=after, **terms))
        num_bytes = self._world.run(self._world.files.tenant_bytes(tenant))
        return None if page is None else [*(file.id for file in page), num_bytes]

    def found(self, name: str, tenant: str = "") -> bool:
        return self._world.run(self._world.files.find(name, tenant or name[0])) is not None

    def objects(self, max_ids: int = 9) -> list[str]:
        """What is to be deleted."""
        return self._world.run(self._world.files.due(max_ids))

    def deleted(self, name: str) -> None:
        self._world.run(self._world.files.deleted(name))

    def batch(self, *names: str, callback: str = "", **terms: Any) -> str:
        for name in names:
            asked = NewBatch(
                endpoint=Endpoint.CHAT,
                input_file_id="file",
                completion_window="24h",
                terms=KeyTerms(tenant=name[0]),
                output_lifetime_s=3600,
            )
            terms = {"window_s": 60, "callback": CALLBACKS.get(callback), **terms}
            said = str(self._world.told(self._world.batches.add(name, asked, **terms)))
        return said

    def feed(
        self, token: int, most: int = 9, more: int = 0, *, runs: bool = False, **end_s: float
    ) -> list[str]:
        """What a feeder takes. `end_s`: by tenant."""
        terms: dict[str, Any] = {"max_batches": most, "max_more": more, "in_progress": runs}
        terms["last_ends_ms"] = {tenant: round(end * 1000) for tenant, end in end_s.items()}
        return self._world.run(self._world.batches.take(str(token), lease_s=LEASE_S, **terms))

    def save(
        self, name: str, status: str = "", expected: str = "", token: int = 1, **terms: Any
    ) -> str:
        """The status afterwards, or the error. `part`, `lost`: the number of a part."""
        options: dict[str, Any] = {"lease_s": terms.pop("lease_s", LEASE_S)}
        options |= {"status": BatchStatus(status) if status else None}
        options |= {"expected": BatchStatus(expected) if expected else None}
        if "part" in terms:
            options["part"] = terms.pop("part"), PART
        if "lost" in terms:
            options["part"] = terms.pop("lost"), None
        call = self._world.batches.save(name, str(token), fields=terms, **options)
        reply = self._world.told(call)
        return reply if isinstance(reply, str) else str(reply[0])

    def move(self, name: str, start_at_s: float, tenant: str = "") -> Any:
        return self._world.run(self._world.batches.move(name, tenant or name[0], start_at_s))

    def stop(self, name: str, tenant: str = "") -> Any:
        return self._world.run(self._world.batches.cancel(name, tenant or name[0]))

    def of(self, name: str, *fields: str) -> list[Any]:
        """Fields of a batch."""
        return [self._world.redis("HGET", f"batch:{name}", field) for field in fields]

    def parts(self, name: str) -> list[int]:
        return list(self._world.run(self._world.batches.parts(name)))


@pytest.fixture
def calls(world: World) -> FileCalls:
    return FileCalls(world)


@scripts("""
a tenant's files have a bound
  add t1 10 30 -> 0.0 60.0
  add t2 21 30 -> FilesFull
  add t2 20 30 -> 0.0 60.0
  add u1 30 30 -> 0.0 60.0
  add t3 0 30 -> 0.0 60.0
  files t -> t1 t2 30
  files t t2 -> t3 30
  files t t9 -> None
one that is written again has its new bytes and its first times
  add t1 10 30; pass_time 1; add t1 40 30 -> -1.0 59.0
  files t -> t1 40
  add t1 5 30; add t2 25 30; files t -> t1 t2 30
  add t3 99; files t t2 -> t3 129
a tenant drops its file: add t1; add t2; drop t1 t -> True
anybody may: add t1; drop t1; files t -> 0
another may not: add t1; drop t1 u -> False
there is none: drop t1 -> False
a dropped file is due for deletion: add t1; add t2; drop t1; objects -> t1
a dropped file counts no more: add t1; add t2; drop t1; files t -> t2 10
the last one leaves no sum: add t1; drop t1; redis EXISTS file_bytes files:t -> 0
a file is read until it expires, by its tenant
  add t1; found t1 u -> False
  pass_time 59.999; found t1 -> True
  objects -> -
  pass_time 0.001; found t1 -> False
  objects -> t1
  files t -> 10
  drop t1; deleted t1; objects -> -
a content without a file is deleted, and a repeated beginning moves nothing
  begin t1 5; begin t2 4; begin t1 9; add t2; begin t2 1; pass_time 4.999; objects -> -
  pass_time 0.001; objects -> t1
  pass_time 60; objects -> t1 t2
  objects 1 -> t1
""")
def test_a_file_counts_until_it_is_dropped(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
its way: save t1 in_progress; save t1 finalizing; save t1 completed -> completed
a repetition moves no time
  save t1 in_progress; pass_time 1; save t1 in_progress; of t1 in_progress_at -> 1700000000000
what is expected: save t1 in_progress validating -> in_progress
what was expected: save t1 in_progress validating; save t1 in_progress validating -> in_progress
another than expected: save t1 finalizing in_progress -> StatusChanged
nothing is recorded then
  save t1 finalizing in_progress total=9; of t1 total status -> None validating
another end: save t1 failed; save t1 completed -> StatusChanged
the same end: save t1 failed; save t1 failed -> failed
progress after the end: save t1 failed; save t1 total=9 -> failed
it is not recorded: save t1 failed; save t1 total=9; of t1 total -> None
another's token: save t1 token=2 -> LeaseLost
no such batch: save t9 -> LeaseLost
it gives the batch back: save t1 lease_s=0; save t1 -> LeaseLost
it is given to another: save t1 lease_s=0; feed 2 -> t1
each save renews the lease
  pass_time 9.999; save t1; pass_time 9.999; feed 2 -> -
  save t1 -> validating
a lapsed lease is lost
  pass_time 10; save t1 -> LeaseLost
  feed 2 -> t1
  save t1 -> LeaseLost
  save t1 token=2 -> validating
  feed 3 -> -
parts are kept, until they are lost
  save t1 in_progress part=0 completed=5 total=9; save t1 part=1 completed=6; save t1 lost=0
  parts t1 -> 1
  of t1 completed total in_progress_at -> 6 9 1700000000000
  redis TTL batch:t1 -> -1
all is kept for a month after the end, and objects are deleted after a minute
  save t1 completed part=1; redis TTL batch:t1 -> 2592000
  redis TTL batch_parts:t1 -> 2592000
  pass_time 59.999; objects -> -
  pass_time 0.001; objects -> t1
  redis ZCARD batches_open -> 0
a completed one is told of, once: save t1 completed; save t1 completed; due -> t1:succeeded
a failed one: save t1 failed; due -> t1:failed
an expired one: save t1 expired; due -> t1:expired
a cancelled one: save t1 cancelled; due -> t1:cancelled
one that goes on: save t1 in_progress; due -> -
an ended one is not taken: save t1 failed lease_s=0; feed 2; feed 2 runs=True -> -
""")
def test_a_feeder_records_what_it_has_done(calls: Calls, script: list[str]) -> None:
    calls.run(["batch t1 callback=a; feed 1 -> t1", *script])


@scripts("""
one that is validated: stop t1 -> cancelling
one in progress: save t1 in_progress; stop t1 -> cancelling
one whose results are joined: save t1 finalizing; stop t1 -> finalizing
one that ends: stop t1; pass_time 1; stop t1; of t1 cancelling_at -> 1700000000000
one that has ended: save t1 completed; stop t1 -> completed
another's: stop t1 u -> None
none: stop t9 -> None
its feeder learns it
  stop t1; save t1 in_progress validating -> StatusChanged
  feed 1 -> t1
  save t1 cancelled cancelling -> cancelled
""")
def test_a_batch_is_cancelled_by_its_feeder(calls: Calls, script: list[str]) -> None:
    calls.run(["batch t1; feed 1 -> t1", *script])


@scripts("""
it is validated at once, its lines run then
  feed 1 -> t1
  save t1 in_progress lease_s=0; feed 2 runs=True; pass_time 9.999; feed 3 runs=True -> -
  pass_time 0.001; feed 3 runs=True -> t1
its window counts from then: of t1 expires -> 1700000070000
it is moved, with its window
  move t1 1700000005 -> True
  of t1 start expires -> 1700000005000 1700000065000
  pass_time 3; move t1 7 -> True
  of t1 start expires -> 1700000003000 1700000063000
  move t1 1700000010 -> False
one that has ended is not moved: feed 1; save t1 failed; move t1 1700000005 -> False
another's: move t1 1700000005 u -> None
none: move t9 1700000005 -> None
it is cancelled before
  feed 1; save t1 in_progress lease_s=0; stop t1 -> cancelling
  feed 2 -> t1
the past is now: batch t2 start_at_s=1; of t2 start expires -> None 1700000060000
""")
def test_a_batch_has_a_start(calls: Calls, script: list[str]) -> None:
    calls.run(["batch t1 start_at_s=1700000010", *script])


@scripts("""
all: feed 1 -> t1 u1 v1 t2 u2 t3
one: feed 1 1 -> t1
none: feed 1 0 -> -
more of tenants without any: feed 1 1 1 -> t1 u1
more than such tenants: feed 1 2 9 -> t1 u1 v1
only such: feed 1 0 2 -> t1 u1
in progress: feed 1 runs=True -> x1
a repeated call gets the same: feed 1 2; feed 1 2 -> t1 u1
what others hold counts
  feed 1 1 -> t1
  feed 2 1 -> u1
  feed 3 0 1 -> v1
  feed 4 0 9 -> -
  feed 4 2 -> t2 u2
of a tenant the one whose window ends first
  batch t4 window_s=1; feed 1 1 -> t4
  feed 2 1 -> u1
  feed 3 0 9 -> v1
one beyond, that ends before another of its tenant
  feed 1 0 t=1700000061 u=1700000064 -> -
  feed 1 0 t=1700000061.001 u=1700000064 -> t1
  feed 2 0 t=1700000070 u=1700000070 -> u1
  feed 2 0 t=1700000070 -> u1
  feed 3 0 1 t=1700000070 -> v1
  feed 4 1 t=1700000070 -> t2 t3
one whose record is gone: redis DEL batch:t1; unsound; feed 1; redis ZSCORE batches_open t1 -> None
feeders are seen: feed 1; redis EXISTS batches_fed -> 1
""")
def test_tenants_take_turns_with_their_batches(calls: Calls, script: list[str]) -> None:
    """The fewest held first, then the earliest end of the window."""
    added = "; pass_time 1; batch ".join(["batch x1", "t1", "t2", "t3", "u1", "v1", "u2"])
    calls.run([added, "feed 9 1; save x1 in_progress token=9 lease_s=0 -> in_progress", *script])


@scripts("""
a tenant's open batches have a bound; one that is added again is the same
  batch t1 t2 max_open=2; batch t3 max_open=2 -> BatchesFull
  batch t1 max_open=2 -> None
  batch u1 max_open=2 -> None
  batch t4 -> None
  feed 1; save t1 failed; save t2 failed; batch t3 max_open=2 -> None
  batch t1; of t1 status -> failed
a list of batches forgets old ones
  batch t1; redis TTL batches:t -> 10368000
  pass_time 10367999.999; batch t2; redis ZRANGE batches:t 0 -1 -> t1 t2
  pass_time 0.001; batch t3; redis ZRANGE batches:t 0 -1 -> t2 t3
  unsound
""")
def test_batches_are_listed(calls: Calls, script: list[str]) -> None:
    calls.run(script)
