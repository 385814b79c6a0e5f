"""Operations on many jobs: which jobs are meant, who works on them, and when they end."""

from typing import Any

import pytest

from contract.function_types import Wanted
from contract.jobs import JobStatus
from contract.operations import MAX_OPEN, OperationKind, Step
from tests.oracle.world import LANES, LEASE_S, NOW_MS, URLS, World, job_id, name_of

DAY_S = 86_400


def add(
    world: World,
    name: str,
    kind: str = "cancel",
    *,
    owner: str = "t",
    tenant: str = "t",
    **wanted: Any,
) -> str:
    terms = {"owner": owner, "tenant": tenant}
    return str(
        world.told(world.operations.add(name, OperationKind(kind), Wanted(**wanted), **terms))
    )


def take(world: World, token: str = "1", only: str = "") -> str | None:
    return world.run(world.operations.take(token, lease_s=LEASE_S, only=only))


def step(world: World, name: str = "a", token: str = "1", **terms: Any) -> str:
    """State, counts and jobs of a step, or the error; `world.reply` keeps the step."""
    world.reply = world.told(world.operations.step(name, token, **({"lease_s": LEASE_S} | terms)))
    if not isinstance(world.reply, Step):
        return str(world.reply)
    s: Step = world.reply
    return " ".join([str(s.state), f"{s.matched}/{s.done}/{s.failed}", *map(name_of, s.job_ids)])


def finish(world: World, name: str = "a", **terms: Any) -> str:
    """Steps until it has ended."""
    take(world, "1", name)
    while (said := step(world, name, **terms)).startswith("running"):
        pass
    return said


def some_jobs(world: World) -> None:
    """Eight of t, two in each second: 0 failed, 1 succeeded, 2 and 3 run; one of u waits."""
    for i in range(8):
        metadata = {"colour": "red"} if i % 2 else {}
        world.submit(
            f"{i}", lane=LANES[i % 3 == 2], metadata=metadata, callback=URLS[0] if i < 2 else None
        )
        world.pass_time(i % 2)
    assert world.claim(jobs=2, lanes=LANES[:1]) == ["0", "1"]
    world.append("0", 1, "failed")
    world.append("1", 1, "succeeded")
    world.claim(jobs=1)
    world.submit("u", "u")


CANCELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all": ({}, ["2", "3", "4", "5", "6", "7"]),
    "of all tenants": ({"tenant": ""}, ["2", "3", "4", "5", "6", "7", "u"]),
    "of another": ({"tenant": "u"}, ["u"]),
    "a lane": ({"lanes": frozenset(["batch"])}, ["2", "5"]),
    "a colour": ({"metadata": {"colour": "red"}}, ["3", "5", "7"]),
    "a model": ({"model": "n"}, []),
    "later ones": ({"created_after_ms": NOW_MS + 2000}, ["6", "7"]),
    "earlier ones": ({"created_before_ms": NOW_MS + 2000}, ["2", "3"]),
    "those between": ({"created_after_ms": NOW_MS, "created_before_ms": NOW_MS + 2000}, ["2", "3"]),
}


@pytest.mark.parametrize("looks", [(1, 20), (500, 20), (3, 2)])
@pytest.mark.parametrize("name", CANCELS)
def test_what_is_meant_is_cancelled_once(world: World, name: str, looks: tuple[int, int]) -> None:
    """In steps of any size."""
    terms, expected = CANCELS[name]
    some_jobs(world)
    add(world, "a", **terms)
    most = {"max_looks": looks[0], "max_jobs": looks[1]}
    num = len(expected)
    assert finish(world, **most) == f"completed {num}/{num}/0"
    cancelled = [n for n in "234567" if world.status(n) == "cancelled"]
    cancelled += ["u"] if world.status("u", "u") == "cancelled" else []
    assert cancelled == expected
    assert [world.status("0"), world.status("1")] == ["failed", "succeeded"]
    assert step(world) == f"completed {num}/{num}/0"
    world.audit.check()


REPLAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all": ({}, ["1", "0"]),
    "a status": ({"statuses": frozenset([JobStatus.FAILED])}, ["0"]),
    "an error": ({"error_code": "engine_error"}, ["0"]),
    "a lane": ({"lanes": frozenset(["batch"])}, []),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_ended_jobs_are_handed_out_to_be_submitted_again(world: World, name: str) -> None:
    """Until they are reported with the cursor behind them."""
    terms, expected = REPLAYS[name]
    some_jobs(world)
    add(world, "a", "replay", **terms)
    assert take(world) == "a"
    words = " ".join(["", *expected])
    num = len(expected)
    state = "running" if expected else "completed"
    assert (step(world), step(world)) == (f"{state} 0/0/0{words}",) * 2
    reported = world.reply
    if expected:
        counts = {"matched": num, "done": num - 1, "failed": 1}
        fields = {"state": reported.state, "job_ids": (), "cursor": reported.cursor}
        assert step(world, reported=Step(**fields, **counts)) == f"completed {num}/{num - 1}/1"
        assert step(world, reported=Step(**fields, matched=9, done=9, failed=9)).endswith(
            f" {num}/{num - 1}/1"
        )


def test_a_page_goes_on_behind_what_was_reported(world: World) -> None:
    some_jobs(world)
    add(world, "a", "replay")
    take(world)
    assert step(world, max_jobs=1) == "running 0/0/0 1"
    reported = Step(world.reply.state, 1, 1, 0, (), world.reply.cursor)
    assert step(world, max_jobs=1, reported=reported) == "running 1/1/0 0"
    assert step(world, max_jobs=0, reported=reported) == "running 1/1/0"
    assert step(world, max_jobs=1) == "running 1/1/0 0"


LETTERS: dict[str, tuple[dict[str, Any], str]] = {
    "all": ({}, "2/2/0"),
    "a status": ({"statuses": frozenset([JobStatus.FAILED])}, "1/1/0"),
    "a colour": ({"metadata": {"colour": "red"}}, "1/1/0"),
    "later ones": ({"created_after_ms": NOW_MS}, "0/0/0"),
    "later ones, then": ({"created_after_ms": NOW_MS - 1}, "2/2/0"),
    "earlier ones": ({"created_before_ms": NOW_MS + 1}, "2/2/0"),
    "earlier ones, then": ({"created_before_ms": NOW_MS}, "0/0/0"),
    "of another": ({"tenant": "u"}, "0/0/0"),
}


@pytest.mark.parametrize("name", LETTERS)
def test_dead_letters_are_replayed(world: World, name: str) -> None:
    """By what is known of the jobs; a letter that was replayed meanwhile counts as no match."""
    terms, counts = LETTERS[name]
    some_jobs(world)
    for taken in world.take():
        world.done(taken, "dead")
    world.submit("x", callback=URLS[1])
    world.cancel("x")
    assert world.due() == ["x cancelled"]
    add(world, "a", "replay_callbacks", **terms)
    assert finish(world, max_looks=1) == f"completed {counts}"
    assert len(world.run(world.outbox.dead("t"))) == 2 - int(counts[0])
    assert len(world.due()) == int(counts[0])
    world.audit.check()


def test_jobs_of_the_operation_s_moment_are_meant_and_later_ones_are_not(world: World) -> None:
    world.submit("0")
    add(world, "a")
    world.submit("1")
    world.pass_time(0.001)
    world.submit("2")
    assert finish(world) == "completed 2/2/0"
    assert [world.status(name) for name in "012"] == ["cancelled", "cancelled", "queued"]


def test_one_gateway_at_a_time_works_on_an_operation(world: World) -> None:
    """By its lease, which each step renews; it may be given back."""
    some_jobs(world)
    assert add(world, "a") == "None"
    assert step(world) == "LeaseLost"
    assert (take(world), take(world, "2"), take(world, "2", "a")) == ("a", None, None)
    assert step(world, token="2") == "LeaseLost"
    for i in range(3):
        world.pass_time(LEASE_S - 0.001)
        assert step(world, max_jobs=1) == f"running {i + 1}/{i + 1}/0"
    world.pass_time(LEASE_S)
    assert step(world) == "LeaseLost"
    assert (take(world, "2"), step(world)) == ("a", "LeaseLost")
    assert step(world, token="2", lease_s=0.0, max_jobs=0) == "running 3/3/0"
    assert step(world, token="2") == "LeaseLost"
    assert take(world, "3") == "a"
    assert step(world, token="3") == "completed 6/6/0"
    world.pass_time(LEASE_S)
    assert take(world, "4") is None
    assert take(world, "4", "a") is None


def test_operations_take_turns(world: World) -> None:
    """The one that was worked on longest ago comes first, also where the clock stands still."""
    for name in "cba":
        add(world, name)
        world.pass_time(0.001)
    world.pass_time(-0.001)

    def taken() -> str:
        name = take(world)
        assert name is not None
        world.run(world.operations.give_back(name, "1"))
        return name

    assert [taken() for _ in range(8)] == ["c", "b", "a", "c", "b", "a", "c", "b"]
    assert take(world, "2", "c") == "c"
    assert world.run(world.operations.take("2", lease_s=LEASE_S, only="none")) is None


def test_a_tenant_s_open_operations_have_a_bound(world: World) -> None:
    """One that is added again is the same; those of others and ended ones do not count."""
    add(world, "u", owner="u")
    assert [add(world, f"{i}") for i in range(MAX_OPEN)] == ["None"] * MAX_OPEN
    assert (add(world, "x"), add(world, "0"), add(world, "v", owner="u")) == (
        "OperationsFull",
        "None",
        "None",
    )
    assert str(world.run(world.operations.stop("0"))) == "cancelled"
    assert (add(world, "0"), add(world, "x")) == ("None", "None")
    found = world.run(world.operations.find("0"))
    assert found is not None
    assert (str(found.state), found.finished_ms) == ("cancelled", world.now_ms)
    listed = world.run(world.operations.of_owner("t"))
    assert len(listed) == MAX_OPEN + 1
    week_s = 8 * DAY_S
    assert week_s - 9 < world.redis("TTL", "operations:t") <= week_s
    assert week_s - DAY_S - 9 < world.redis("TTL", "operation:0") <= week_s - DAY_S
    assert world.redis("TTL", "operation:1") == -1
    world.pass_time(week_s)
    world.run(world.operations.stop("1"))
    add(world, "y")
    assert world.redis("ZRANGE", "operations:t", 0, -1) == ["y"]


def test_a_stopped_operation_goes_no_further(world: World) -> None:
    some_jobs(world)
    add(world, "a")
    take(world)
    step(world, max_jobs=2)
    assert str(world.run(world.operations.stop("a"))) == "cancelled"
    world.pass_time(1)
    assert str(world.run(world.operations.stop("a"))) == "cancelled"
    assert world.run(world.operations.stop("none")) is None
    found = world.run(world.operations.find("a"))
    assert found is not None
    assert found.finished_ms == world.now_ms - 1000
    assert step(world) == "cancelled 2/2/0"
    assert world.status("2") != "cancelled"
    assert world.redis("ZCARD", "operations_open") == 0


def test_an_operation_ends_after_a_day(world: World) -> None:
    world.run_job("0", retention_s=9 * DAY_S)
    add(world, "a", "replay")
    world.pass_time(DAY_S)
    take(world)
    assert step(world) == "running 0/0/0 0"
    world.pass_time(0.001)
    assert step(world) == "expired 0/0/0 0"
    assert world.redis("ZCARD", "operations_open") == 0
    assert world.redis("HGET", "operation:a", "finished") == str(world.now_ms)


def test_the_calls_of_flows_are_left_to_their_flows(world: World) -> None:
    world.submit("0")
    world.submit("1", parent=job_id("0"))
    add(world, "a")
    assert finish(world) == "completed 1/1/0"
    assert [world.status(name) for name in "01"] == ["cancelled", "queued"]
