"""Files and batches: what is recorded, for whom, until when, and who may write to a batch."""

from typing import Any

import pytest

from contract.api_keys import KeyTerms
from contract.batches import BatchStatus, NewBatch, Part
from contract.files import StoredFile
from contract.jobs import Endpoint
from tests.oracle.world import LEASE_S, URLS, World

PART = Part("0" * 16, 5, 1, 7, 0, False)


# --- files


def add(world: World, name: str, num_bytes: int = 10, tenant: str = "t", most: int = 0) -> Any:
    file = StoredFile(id=name, tenant=tenant, num_bytes=num_bytes, purpose="batch", filename="ä b")
    return world.told(world.files.add(file, lifetime_s=60, max_tenant_bytes=most))


def files(world: World, tenant: str = "t", after: str = "") -> list[str] | None:
    terms: dict[str, Any] = {"purpose": "", "is_oldest_first": True, "max_files": 2}
    page = world.run(world.files.page(tenant, after=after, **terms))
    return None if page is None else [file.id for file in page]


def num_bytes(world: World, tenant: str = "t") -> int:
    return world.run(world.files.tenant_bytes(tenant))


def due(world: World, max_ids: int = 9) -> list[str]:
    return world.run(world.files.due(max_ids))


def test_a_tenant_s_files_have_a_bound(world: World) -> None:
    """Their bytes in all; a file that is written again has its new bytes, and its first times."""
    first = add(world, "a", 10, most=30)
    assert (first.created_ms, first.expires_ms) == (world.now_ms, world.now_ms + 60_000)
    assert add(world, "b", 21, most=30) == "FilesFull"
    assert add(world, "b", 20, "u", most=30).id == "b"
    assert add(world, "c", 20, most=30).id == "c"
    world.pass_time(1)
    again = add(world, "a", 5, most=30)
    assert (again.created_ms, num_bytes(world)) == (first.created_ms, 25)
    assert add(world, "d", 5, most=30).id == "d"
    assert add(world, "e", 99).id == "e", "0 is no bound"
    assert (files(world), files(world, after="c"), files(world, after="b")) == (
        ["a", "c"],
        ["d", "e"],
        None,
    )
    world.audit.check()


@pytest.mark.parametrize(("tenant", "is_dropped"), [("t", True), ("", True), ("u", False)])
def test_a_file_is_dropped_for_its_tenant(world: World, tenant: str, is_dropped: bool) -> None:
    """Its bytes count no more, and its content is due for deletion."""
    add(world, "a")
    add(world, "b")
    assert world.run(world.files.drop("a", tenant)) is is_dropped
    assert (num_bytes(world), files(world)) == ((10, ["b"]) if is_dropped else (20, ["a", "b"]))
    assert due(world) == ["a"] * is_dropped
    assert world.run(world.files.drop("a", "t")) is not is_dropped
    world.run(world.files.drop("b", "t"))
    assert world.redis("EXISTS", "file_bytes") == 0
    world.audit.check()


def test_a_file_is_read_until_it_expires(world: World) -> None:
    add(world, "a")
    assert world.run(world.files.find("a", "u")) is None
    world.pass_time(59.999)
    assert world.run(world.files.find("a", "t")) is not None
    assert due(world) == []
    world.pass_time(0.001)
    assert world.run(world.files.find("a", "t")) is None
    assert (files(world), due(world)) == ([], ["a"])
    world.run(world.files.deleted("a"))
    assert due(world) == []


def test_a_content_without_a_file_is_deleted(world: World) -> None:
    """A repeated beginning moves nothing; the longest due come first."""
    world.run(world.files.begin("lost", upload_s=5))
    world.run(world.files.begin("a", upload_s=4))
    world.run(world.files.begin("lost", upload_s=9))
    add(world, "a")
    world.run(world.files.begin("a", upload_s=1))
    world.pass_time(4.999)
    assert due(world) == []
    world.pass_time(0.001)
    assert due(world) == ["lost"]
    world.pass_time(60)
    assert (due(world), due(world, 1)) == (["lost", "a"], ["lost"])


# --- batches


def batch(world: World, name: str, tenant: str = "t", **terms: Any) -> str:
    asked = NewBatch(
        endpoint=Endpoint.CHAT,
        input_file_id="file",
        completion_window="24h",
        terms=KeyTerms(tenant=tenant),
        output_lifetime_s=3600,
    )
    return str(world.told(world.batches.add(name, asked, **({"window_s": 60} | terms))))


def take(
    world: World, token: str, most: int = 9, more: int = 0, *, runs: bool = False
) -> list[str]:
    terms: dict[str, Any] = {"lease_s": LEASE_S, "in_progress": runs}
    return world.run(world.batches.take(token, max_batches=most, max_more=more, **terms))


def save(world: World, status: str | None = None, expected: str | None = None, **terms: Any) -> str:
    """The status afterwards, or the error."""
    name, token = terms.pop("name", "a"), terms.pop("token", "1")
    terms |= {
        "status": status and BatchStatus(status),
        "expected": expected and BatchStatus(expected),
    }
    reply = world.told(world.batches.save(name, token, **({"lease_s": LEASE_S} | terms)))
    return reply if isinstance(reply, str) else str(reply[0])


def cancel(world: World, name: str = "a", tenant: str = "t") -> str:
    return str(world.run(world.batches.cancel(name, tenant)))


def test_a_tenant_s_open_batches_have_a_bound(world: World) -> None:
    """One that is added again is the same."""
    assert [batch(world, name, max_open=2) for name in "abc"] == ["None", "None", "BatchesFull"]
    assert batch(world, "c", "u", max_open=2) == "None"
    assert batch(world, "d") == "None"
    take(world, "1")
    save(world, "failed")
    assert batch(world, "a", max_open=1) == "None"
    assert str(world.run(world.batches.find("a")).status) == "failed"  # type: ignore[union-attr]
    assert world.run(world.batches.find("a", "u")) is None
    keep = world.redis("HGET", "batch:a", "keep_ms")
    left = world.redis("PTTL", "batches:t")
    assert 60_000 < left <= 60_000 + 2 * int(keep)
    world.audit.check()


# Steps of a feeder with the token 1 that holds `a`; the replies.
SAVES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "its way": (
        [{"status": s} for s in ("in_progress", "finalizing", "completed")],
        ["in_progress", "finalizing", "completed"],
    ),
    "a repetition": ([{"status": "in_progress"}] * 2, ["in_progress"] * 2),
    "what is expected": (
        [{"status": "in_progress", "expected": "validating"}] * 2,
        ["in_progress"] * 2,
    ),
    "another than expected": (
        [{"status": "finalizing", "expected": "in_progress"}],
        ["StatusChanged"],
    ),
    "another end": ([{"status": "failed"}, {"status": "completed"}], ["failed", "StatusChanged"]),
    "the same end": ([{"status": "failed"}] * 2, ["failed"] * 2),
    "progress after the end": ([{"status": "failed"}, {"fields": {"total": 9}}], ["failed"] * 2),
    "another's token": ([{"token": "2"}], ["LeaseLost"]),
    "no such batch": ([{"name": "none"}], ["LeaseLost"]),
    "it gives the batch back": ([{"lease_s": 0.0}, {}], ["validating", "LeaseLost"]),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_feeder_records_what_it_has_done(world: World, name: str) -> None:
    steps, expected = SAVES[name]
    batch(world, "a", callback=URLS[0])
    assert take(world, "1") == ["a"]
    said = []
    for step in steps:
        world.pass_time(1)
        said.append(save(world, **step))
        world.audit.check()
    assert said == expected
    assert world.redis("HGET", "batch:a", "total") is None
    if len(set(said)) == 1 and said[0] == steps[0].get("status"):
        at = world.redis("HGET", "batch:a", f"{said[0]}_at")
        assert int(at) == world.now_ms - 1000 * (len(steps) - 1), "of the first"


def test_a_feeder_holds_a_batch_by_its_lease(world: World) -> None:
    """Each save renews it; once it has lapsed, another may take the batch."""
    batch(world, "a")
    take(world, "1")
    for _ in range(3):
        world.pass_time(LEASE_S - 0.001)
        assert (take(world, "2"), save(world)) == ([], "validating")
    world.pass_time(LEASE_S)
    assert save(world) == "LeaseLost"
    assert (take(world, "2"), take(world, "3")) == (["a"], [])
    assert (save(world), save(world, token="2")) == ("LeaseLost", "validating")


def test_parts_are_kept_until_the_batch_is_forgotten(world: World) -> None:
    """One may be lost; fields of the record are kept as they were given last."""
    batch(world, "a", callback=URLS[0])
    take(world, "1")
    save(world, "in_progress", part=(0, PART), fields={"completed": 5, "total": 9})
    save(world, part=(1, PART), fields={"completed": 6})
    save(world, part=(0, None))
    assert world.run(world.batches.parts("a")) == {1: PART}
    found = world.run(world.batches.find("a"))
    assert found is not None
    assert (found.completed, found.total, found.in_progress_ms) == (6, 9, world.now_ms)
    assert world.redis("TTL", "batch:a") == -1
    save(world, "completed")
    keep_s = int(world.redis("HGET", "batch:a", "keep_ms")) / 1000
    for key in ("batch:a", "batch_parts:a"):
        assert keep_s - 9 < world.redis("TTL", key) <= keep_s
    assert world.due() == ["a succeeded"]
    world.pass_time(59.999)
    assert due(world) == []
    world.pass_time(0.001)
    assert due(world) == ["a"]
    world.audit.check()


@pytest.mark.parametrize("end", ["failed", "expired", "cancelled", "completed"])
def test_a_batch_s_end_is_told_once(world: World, end: str) -> None:
    batch(world, "a", callback=URLS[0])
    batch(world, "b")
    take(world, "1")
    for name in "ab":
        save(world, end, name=name)
        save(world, end, name=name)
    assert world.due() == [f"a {'succeeded' if end == 'completed' else end}"]
    assert take(world, "2") == take(world, "2", runs=True) == []


CANCELS = {
    "validating": "cancelling", "in_progress": "cancelling", "finalizing": "finalizing",
    "cancelling": "cancelling", "completed": "completed", "cancelled": "cancelled",
}  # fmt: skip


@pytest.mark.parametrize("status", CANCELS)
def test_a_batch_is_cancelled_by_its_feeder(world: World, status: str) -> None:
    """The caller asks for it; a feeder that expects another status learns it."""
    batch(world, "a")
    take(world, "1")
    save(world, status)
    assert (cancel(world, tenant="u"), cancel(world, "none")) == ("None", "None")
    world.pass_time(1)
    assert (cancel(world), cancel(world)) == (CANCELS[status], CANCELS[status])
    is_told = CANCELS[status] == "cancelling" and status != "cancelling"
    assert save(world, expected=status) == ("StatusChanged" if is_told else status)
    if is_told:
        assert world.redis("HGET", "batch:a", "cancelling_at") == str(world.now_ms)
        assert take(world, "1") == ["a"]
        assert save(world, "cancelled", "cancelling") == "cancelled"
    world.audit.check()


TAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all": ({}, ["t1", "u1", "v1", "t2", "u2", "t3"]),
    "one": ({"most": 1}, ["t1"]),
    "none": ({"most": 0}, []),
    "more of tenants without any": ({"most": 1, "more": 1}, ["t1", "u1"]),
    "more than such tenants": ({"most": 2, "more": 9}, ["t1", "u1", "v1"]),
    "only such": ({"most": 0, "more": 2}, ["t1", "u1"]),
    "in progress": ({"runs": True}, ["x1"]),
}


@pytest.mark.parametrize("name", TAKES)
def test_tenants_take_turns_with_their_batches(world: World, name: str) -> None:
    """The fewest held first, then the oldest; a repeated call gets the same again."""
    terms, expected = TAKES[name]
    for each in ("x1", "t1", "t2", "t3", "u1", "v1", "u2"):
        batch(world, each, each[0])
        if each == "x1":
            take(world, "x")
            save(world, "in_progress", name="x1", token="x", lease_s=0.0)
        world.pass_time(1)
    assert take(world, "1", **terms) == expected
    assert set(expected) <= set(take(world, "1", **terms))
    held = [each for each in ("t1", "u1", "v1", "x1") if each in expected]
    assert all(save(world, name=each) != "LeaseLost" for each in held)


def test_batches_that_others_hold_count(world: World) -> None:
    for each in ("t1", "t2", "u1", "t3"):
        batch(world, each, each[0])
        world.pass_time(1)
    assert take(world, "1", 1) == ["t1"]
    assert take(world, "2", 1) == ["u1"]
    assert take(world, "3", 0, 9) == []
    assert take(world, "3", 1) == ["t2"]
    world.redis("DEL", "batch:t3")
    assert take(world, "4") == []
    assert "t3" not in world.redis("ZRANGE", "batches_open", 0, -1)
    assert world.run(world.batches.are_fed())


def test_a_list_of_batches_forgets_old_ones(world: World) -> None:
    batch(world, "a")
    keep_s = int(world.redis("HGET", "batch:a", "keep_ms")) / 1000
    world.pass_time(60 + 2 * keep_s - 0.001)
    batch(world, "b")
    assert world.redis("ZRANGE", "batches:t", 0, -1) == ["a", "b"]
    world.pass_time(0.001)
    batch(world, "c")
    assert world.redis("ZRANGE", "batches:t", 0, -1) == ["b", "c"]
