"""What workers and callers may do with a job in each state, and what the functions count of it."""

from collections.abc import Callable
from typing import Any

import pytest

from contract.events import End
from contract.function_types import JobMark, TenantLimits, Wanted
from contract.jobs import JobStatus
from tests.oracle.world import LANES, LEASE_S, REF, World, job_id

Act = Callable[[World], Any]


def running(world: World, name: str = "a", num_events: int = 0, **terms: Any) -> None:
    """A job at the worker `w` with so many events of a token."""
    assert world.submit(name, **terms) == "new"
    assert name in world.claim(jobs=1)
    for _ in range(num_events):
        world.append(name)


def to_another(world: World) -> None:
    world.release("a")
    assert world.claim("x") == ["a"]


def log(world: World, name: str = "a") -> list[Any]:
    """The numbers of its events, and the status that ends it."""
    found = world.run(world.functions.read(job_id(name), "t", max_events=99))
    assert found is not None
    return [e.event.status if isinstance(e.event, End) else e.number for e in found[1]]


# What happened to a job of three events before, and the verdict on its next event.
APPENDS: dict[str, tuple[Act | None, dict[str, Any], str]] = {
    "the next event": (None, {}, "OK 5"),
    "several tokens": (None, {"num": 7}, "OK 5"),
    "one token too many": (None, {"num": 8}, "OVER 3"),
    "no tokens": (None, {"num": 0}, "OK 4"),
    "the last event again": (None, {"shift": -1}, "OK 4"),
    "a gap": (None, {"shift": 1}, "GAP 4"),
    "an end": (None, {"fin": "succeeded"}, "OK 6"),
    "an end alone": (None, {"num": 0, "fin": "failed"}, "OK 5"),
    "an end after a gap": (None, {"fin": "failed", "shift": 1}, "GAP 4"),
    "an earlier claim": (None, {"epoch": 0}, "FENCED 0"),
    "a later claim": (None, {"epoch": 2}, "FENCED 0"),
    "another worker": (None, {"worker": "x"}, "FENCED 0"),
    "it waits": (lambda w: w.release("a"), {}, "FENCED 0"),
    "it runs elsewhere": (to_another, {}, "FENCED 0"),
    "it came back": (lambda w: (w.release("a"), w.claim(loses_reply=True)), {}, "FENCED 0"),
    "no such job": (lambda w: (w.cancel("a"), w.delete("a")), {}, "GONE 0"),
    "a cancelled job": (lambda w: w.cancel("a"), {}, "cancelled 0"),
    "an ended job": (lambda w: w.append("a", 1, "succeeded"), {}, "succeeded 0"),
    "in time": (lambda w: w.pass_time(599.999), {}, "OK 5"),
    "at its deadline": (lambda w: w.pass_time(600), {}, "expired 0"),
    "a lapsed lease that nobody took": (lambda w: w.pass_time(LEASE_S), {}, "OK 5"),
}


@pytest.mark.parametrize("name", APPENDS)
def test_an_event_is_appended_once_by_its_holder(world: World, name: str) -> None:
    """A refused one changes nothing."""
    event, says, expected = APPENDS[name]
    running(world, num_events=3)
    if event:
        event(world)
    before = log(world) if expected != "GONE 0" else []
    terms = dict(says)
    assert world.append("a", terms.pop("num", 1), **terms) == expected
    world.audit.check()
    if expected != "GONE 0" and not expected.startswith(("OK 5", "OK 6", "expired")):
        assert log(world) == before


def test_each_item_of_an_append_has_its_own_verdict(world: World) -> None:
    """Whether it goes on, ends, or is refused, and twice for one job."""
    for name in "abcd":
        running(world, name, 2)
    running(world, "e")
    world.cancel("b")
    items = [world.says("a", 2), world.says("b"), world.says("c", 1, "succeeded")]
    items += [
        world.says("d"),
        world.says("d", 1, shift=1),
        world.says("e"),
        world.says("a", 9, shift=1),
    ]
    expected = ["OK 4", "cancelled 0", "OK 5", "OK 4", "OK 5", "OK 2", "OVER 4"]
    reply = world.run(world.functions.append("w", items, lease_s=LEASE_S))
    assert [f"{verdict} {number}" for verdict, number in reply] == expected


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_an_event_renews_the_lease_where_it_is_asked_to(world: World, num_events: int) -> None:
    running(world, num_events=num_events)
    running(world, "b", num_events)
    world.pass_time(LEASE_S - 1)
    world.append("a")
    world.append("b", lease_s=0.0)
    assert world.sweep() == (0, 0, 0, 0)
    world.pass_time(1)
    assert world.sweep()[0] == 1
    assert (world.status("a"), world.status("b")) == ("streaming", "queued")
    world.pass_time(LEASE_S - 2)
    assert world.sweep()[0] == 0
    world.pass_time(1)
    assert world.sweep()[0] == 1


LEAVES: dict[str, tuple[Act, str]] = {
    "released": (lambda w: w.release("a"), "queued"),
    "given back with an error": (lambda w: w.release("a", "error"), "queued"),
    "blamed": (lambda w: w.blame("a", 3), "queued"),
    "lapsed": (lambda w: (w.pass_time(LEASE_S), w.sweep()), "queued"),
    "cancelled": (lambda w: w.cancel("a"), "cancelled"),
    "expired": (lambda w: (w.pass_time(600), w.sweep()), "expired"),
    "failed": (lambda w: w.append("a", 0, "failed"), "failed"),
    "kept elsewhere": (lambda w: w.append("a", 1, "succeeded", result=REF), "succeeded"),
    "moved": (lambda w: w.move("a", "batch", 900), "streaming"),
    "given another deadline": (lambda w: w.move("a", "", 900), "streaming"),
    "detached": (lambda w: w.detach("a", 900, 900), "streaming"),
    "offered": (lambda w: w.release("a", "offer"), "streaming"),
    "taken by another": (lambda w: (w.release("a", "offer"), w.claim("x")), "claimed"),
    "claimed again": (lambda w: (w.release("a"), w.claim("x")), "claimed"),
    "swept in time": (lambda w: w.sweep(), "streaming"),
}


@pytest.mark.parametrize("num_events", [0, 1, 3])
@pytest.mark.parametrize("name", LEAVES)
def test_progress_is_kept_whatever_becomes_of_a_job(
    world: World, name: str, num_events: int
) -> None:
    """Callers see every event at once, and the next holder goes on behind the last."""
    act, status = LEAVES[name]
    running(world, num_events=num_events)
    running(world, "b")
    world.audit.check()
    act(world)
    world.audit.check()
    if not num_events and status == "streaming":
        status = "claimed"
    assert world.status("a") == status
    if status == "queued":
        assert "a" in world.claim("x", lanes=["batch", *LANES])
        assert world.append("a", worker="x") == f"OK {num_events + 2}"
    elif status in ("claimed", "streaming"):
        holder = "x" if "a" in world.held["x"] else "w"
        assert world.append("a", worker=holder) == f"OK {num_events + 2}"
    world.audit.check()


def test_a_caller_sees_what_was_appended(world: World) -> None:
    """In the record, in lists, and as people watch it."""
    running(world, num_events=3)
    running(world, "b")
    found = world.run(world.functions.read(job_id("a"), "t"))
    assert found is not None
    assert (found[0].num_output_tokens, found[0].next_number) == (3, 4)
    page = world.run(world.functions.list_jobs("t", Wanted()))
    assert page is not None
    assert [view.num_output_tokens for view in page.views] == [0, 3]
    watched = world.run(world.functions.watch("m", LANES))
    assert [w.num_output_tokens for w in watched.held] in ([], [0, 3], [3, 0])


def attempts(world: World, kind: str, num: int) -> list[str]:
    said = []
    for _ in range(num):
        world.claim()
        said.append(world.release("a", kind))
    return said


def test_errors_end_a_job_and_drains_do_not(world: World) -> None:
    world.submit("a", max_attempts=2)
    assert attempts(world, "drain", 3) == ["OK"] * 3
    assert attempts(world, "error", 3) == ["OK", "failed", "failed"]
    assert world.field("a", "attempt", "releases", "code", "message") == [
        "2",
        "3",
        "engine_error",
        "it broke",
    ]


def test_a_job_is_released_thirty_two_times(world: World) -> None:
    world.submit("a")
    assert attempts(world, "drain", 33) == ["OK"] * 32 + ["failed"]
    assert world.field("a", "code", "attempt") == ["retries", "1"]


@pytest.mark.parametrize("kind", ["drain", "error", "offer", "blame"])
def test_who_does_not_hold_a_job_gives_back_none(world: World, kind: str) -> None:
    def give_back(worker: str = "w") -> str:
        return world.blame("a", 3, worker) if kind == "blame" else world.release("a", kind, worker)

    assert give_back() == "GONE"
    world.submit("a")
    assert give_back() == "FENCED"
    world.claim()
    assert give_back("x") == "FENCED"
    world.pass_time(600)
    assert (give_back(), give_back()) == ("expired", "expired")
    assert world.status("a") == "expired"


@pytest.mark.parametrize(
    ("max_crashes", "expected"),
    [(1, ["failed"]), (2, ["OK", "failed"]), (3, ["OK", "OK", "failed"])],
)
def test_a_job_that_kills_engines_is_poison(
    world: World, max_crashes: int, expected: list[str]
) -> None:
    """On its last run it is alone; then it enters the quarantine."""
    world.submit("a")
    said, company = [], []
    for _ in expected:
        company += world.claim(is_idle=True)
        said.append(world.blame("a", max_crashes))
    assert said == expected
    alone = [False] * (max_crashes - 1) + [max_crashes > 1]
    assert [each.endswith("alone") for each in company] == alone
    assert world.field("a", "code", "crashes") == ["poison", str(max_crashes)]
    assert world.redis("HGET", "poison", job_id("a")) == "{}"
    world.audit.check()


def test_a_lease_lapses_once_for_company_and_then_alone(world: World) -> None:
    for name, lapse in (("a", 1), ("a", 2), ("a alone", 3)):
        if lapse == 1:
            world.submit("a")
        assert world.claim(is_idle=True) == [name]
        world.pass_time(LEASE_S - 1)
        assert world.sweep() == (0, 0, 0, 0)
        world.pass_time(1)
        assert world.sweep() == (1, 0, 0, 0)
        assert world.field("a", "lapses") == str(lapse)


def test_a_heartbeat_renews_what_a_worker_holds(world: World) -> None:
    """The reply names what it does not: cancelled, of an earlier claim, another's."""
    for name in "abcd":
        running(world, name)
    world.cancel("b")
    world.release("c")
    world.claim("x")
    world.release("d")
    world.claim(loses_reply=True)
    world.pass_time(LEASE_S - 1)
    assert world.beat() == ["b", "c", "d"]
    world.pass_time(2)
    assert world.sweep() == (2, 0, 0, 0), "of c and d"
    assert world.status("a") == "claimed"


def test_a_worker_finds_what_a_lost_reply_gave_it(world: World) -> None:
    running(world)
    world.submit("b")
    world.claim(loses_reply=True)
    world.pass_time(LEASE_S - 1)
    assert (world.mine("x"), world.mine(), world.mine()) == ([], ["b"], [])
    world.pass_time(2)
    assert world.sweep() == (1, 0, 0, 0), "mine renews what it names"
    assert world.append("b") == "OK 2"


def test_after_a_restart_of_redis_leases_last_for_a_grace(world: World) -> None:
    running(world)
    world.submit("b", attendance_s=5)
    world.sweep()
    world.redis("SET", "runid", "another 0")
    world.pass_time(LEASE_S + 1)
    assert world.sweep() == (0, 0, 0, 0)
    world.submit("c", deadline_s=1)
    world.pass_time(9.999)
    assert world.sweep() == (0, 1, 0, 0), "deadlines know no grace"
    world.pass_time(0.001)
    assert world.sweep() == (1, 0, 1, 0)


def test_an_order_to_drain_reaches_live_workers(world: World) -> None:
    world.beat()
    assert world.run(world.functions.drain(["w", "x"])) == [True, False]
    assert world.redis("HGET", "worker:w", "order") == "drain"
    assert world.redis("EXISTS", "worker:x") == 0


def test_workers_that_claim_nothing_are_told_apart(world: World) -> None:
    """Since when, by the first heartbeat that said so; a worker that is up or gone is not."""

    def aside() -> list[tuple[str, str, float]]:
        found = world.run(world.functions.snapshot("m", LANES))
        return [(each.worker.incarnation, each.state, each.for_s) for each in found.aside]

    def live() -> list[str]:
        found = world.run(world.functions.snapshot("m", LANES))
        return [worker.incarnation for worker in found.workers]

    for worker in "wx":
        world.beat(worker)
    assert (live(), aside()) == (["w", "x"], [])
    world.beat("w", state="draining")
    world.pass_time(4)
    world.beat("w", state="draining")
    assert (live(), aside()) == (["x"], [("w", "draining", 4.0)])
    world.beat("w", state="loading")
    assert aside() == [("w", "loading", 4.0)]
    world.beat("w")
    world.beat("x", state="gone")
    assert (live(), aside()) == (["w"], [])
    world.beat("w", state="draining")
    world.beat("w", state="gone")
    assert (live(), aside()) == ([], [])
    world.beat("w")
    world.pass_time(15)
    assert live() == ["w"]
    world.pass_time(0.001)
    assert live() == []


def test_a_pool_has_the_means_of_its_live_workers(world: World) -> None:
    """Of those that have measured; two of them are twice as fast."""
    world.beat("w", 10.0, jobs=4, tokens=100)
    world.beat("x", 30.0, jobs=2)
    world.beat("y")
    names = ("tokens_per_s", "max_jobs", "max_tokens")
    assert [float(world.redis("HGET", "pool:m", name)) for name in names] == [20, 3, 100]
    world.submit("a", cap=117)
    world.submit("b")
    assert world.place == (1, 120, 0.0)
    for worker in "xy":
        world.beat(worker, state="draining")
    world.submit("c", cap=200)
    assert world.place == (2, 133, 13.3)


# A call on a job in each state: waiting, running, ended, another's or gone.
CALLS: dict[str, tuple[Callable[[World, str], str], list[str]]] = {
    "cancel": (
        lambda w, name: w.cancel(name),
        ["cancelled", "cancelled", "succeeded", "None", "None"],
    ),
    "delete": (lambda w, name: w.delete(name), ["queued", "streaming", "True", "False", "False"]),
    "detach": (lambda w, name: w.detach(name, 5, 5), ["OK", "OK", "succeeded", "None", "None"]),
    "move": (lambda w, name: w.move(name, "batch"), ["OK", "OK", "succeeded", "None", "None"]),
    "a deadline": (lambda w, name: w.move(name, "", 5), ["OK", "OK", "succeeded", "None", "None"]),
    "read": (lambda w, name: w.status(name), ["queued", "streaming", "succeeded", "none", "none"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_caller_s_call_on_a_job_of_each_state(world: World, name: str) -> None:
    call, expected = CALLS[name]
    world.run_job("ended")
    running(world, "runs", 1)
    world.submit("waits")
    world.submit("another's", "u")
    names = ("waits", "runs", "ended", "another's", "gone")
    assert [call(world, each) for each in names] == expected
    world.audit.check()


def test_a_cancel_tells_the_worker(world: World) -> None:
    """Also a sweep does, and a move, and a detached call; an offer that is taken."""
    for name in "abcde":
        running(world, name, attendance_s=0)
    with world.client.pubsub(ignore_subscribe_messages=True) as told:  # type: ignore[no-untyped-call]
        told.subscribe(world.keys.of("ctl", "w"))
        told.get_message(timeout=5)
        world.cancel("a")
        world.move("b", "batch", 5)
        world.move("b", "", 7)
        world.detach("c", 700, 5)
        world.release("d", "offer")
        world.claim("x")
        world.run(world.functions.heartbeat("w", "m", [], lease_s=10, info="{}"))
        world.run(world.functions.drain(["w"]))
        world.pass_time(7)
        world.sweep()
        said = []
        while (message := told.get_message(timeout=0.2)) is not None:
            said.append(message["data"].decode().replace("job-0-", ""))
    assert said == [
        "ended a cancelled",
        "moved b batch 5000",
        "moved b batch 7000",
        "moved c interactive 700000",
        "taken d 1",
        "drain",
        "ended b expired",
    ]


def test_what_waits_is_hinted_to_workers(world: World) -> None:
    with world.client.pubsub(ignore_subscribe_messages=True) as told:  # type: ignore[no-untyped-call]
        told.subscribe(world.keys.of("wake", "m"))
        told.get_message(timeout=5)
        world.submit("a")
        world.claim()
        world.release("a")
        world.claim()
        world.move("a", "batch")
        world.blame("a", 3)
        world.pause("batch")
        world.resume("batch")
        said = []
        while (message := told.get_message(timeout=0.2)) is not None:
            said.append(message["data"].decode())
    assert said == ["interactive", "interactive", "batch", "batch"]


def test_a_detached_job_needs_no_caller(world: World) -> None:
    """Neither its deadline nor its retention gets shorter; its result no longer gives way."""
    for name, is_passing in (("a", True), ("b", False)):
        world.submit(name, attendance_s=5, deadline_s=50, retention_s=70, is_passing=is_passing)
    assert world.run(world.functions.attend([job_id("a"), job_id("none")])) == 1
    assert (world.detach("a", 40, 60), world.field("a", "ttl_ms")) == ("OK", "70000")
    assert int(world.field("a", "deadline")) == world.now_ms + 50_000
    assert world.field("a", "passing") is None
    world.pass_time(5)
    assert world.sweep() == (0, 0, 1, 0)
    assert [world.status(name) for name in "ab"] == ["queued", "cancelled"]
    assert world.run(world.functions.attend([job_id("a")])) == 0
    assert (world.detach("a", 90, 80), world.field("a", "ttl_ms")) == ("OK", "80000")
    assert int(world.field("a", "deadline")) == world.now_ms + 90_000


def test_an_attended_job_goes_on(world: World) -> None:
    world.submit("a", attendance_s=5)
    world.submit("b")
    for _ in range(3):
        world.pass_time(4)
        assert world.run(world.functions.attend([job_id("a"), job_id("b")])) == 1
        assert world.sweep() == (0, 0, 0, 0)
    world.pass_time(5)
    assert world.sweep() == (0, 0, 1, 0)
    world.run(world.functions.attend([job_id("a")]))
    assert world.redis("EXISTS", "attended") == 0


def test_an_ended_job_is_forgotten_after_its_retention(world: World) -> None:
    """What lies in the object store becomes orphaned."""
    world.run_job("a", retention_s=20)
    world.run_job("b", retention_s=20, is_stored=True)
    assert 0 < world.redis("PTTL", "job:job-0-a") <= 20_000
    assert 0 < world.redis("PTTL", "log:job-0-a") <= 20_000
    world.pass_time(19.999)
    assert world.sweep() == (0, 0, 0, 0)
    world.pass_time(0.001)
    assert world.sweep() == (0, 0, 0, 2)
    assert world.redis("SMEMBERS", "orphaned") == ["job-0-b"]
    world.audit.check_at_rest()


def test_a_sweep_has_a_bound(world: World) -> None:
    for i in range(5):
        world.submit(f"{i}", deadline_s=1)
    world.pass_time(1)
    assert world.run(world.functions.sweep(max_jobs=2)).num_expired == 2
    assert world.sweep() == (0, 3, 0, 0)


def some_jobs(world: World) -> None:
    """Eight jobs of t, the oldest first, two in each second; one of u."""
    for i in range(8):
        metadata = {"colour": "red"} if i % 2 else {"colour": "blue", "size": "1"}
        world.submit(
            f"{i}",
            lane=LANES[i % 3 == 2],
            metadata=metadata if i else {},
            model="n" if i == 5 else "m",
        )
        world.pass_time(i % 2)
    world.claim(jobs=3)
    world.append("0", 1, "failed")
    world.append("1", 1, "succeeded")
    world.submit("u", "u")


START = 1_700_000_000_000
LISTS: dict[str, tuple[Wanted, dict[str, Any], list[str]]] = {
    "all": (Wanted(), {}, ["7", "6", "5", "4", "3", "2", "1", "0"]),
    "of all tenants": (Wanted(), {"tenant": ""}, ["u", "7", "6", "5", "4", "3", "2", "1", "0"]),
    "of another": (Wanted(), {"tenant": "u"}, ["u"]),
    "of nobody": (Wanted(), {"tenant": "v"}, []),
    "a page": (Wanted(), {"max_jobs": 3}, ["7", "6", "5", "after 5"]),
    "the next page": (Wanted(), {"max_jobs": 3, "after": "job-0-5"}, ["4", "3", "2", "after 2"]),
    "the last page": (Wanted(), {"max_jobs": 3, "after": "job-0-2"}, ["1", "0"]),
    "behind the last": (Wanted(), {"after": "job-0-0"}, []),
    "behind none": (Wanted(), {"after": "job-0-none"}, ["none"]),
    "behind another's": (Wanted(), {"after": "job-0-u"}, ["none"]),
    "few looks": (Wanted(lanes=frozenset(["batch"])), {"max_looks": 2}, ["after 6"]),
    "a lane": (Wanted(lanes=frozenset(["batch"])), {}, ["5", "2"]),
    "lanes": (Wanted(lanes=frozenset(LANES)), {"max_jobs": 2}, ["7", "6", "after 6"]),
    "a model": (Wanted(model="n"), {}, ["5"]),
    "a status": (Wanted(statuses=frozenset([JobStatus.QUEUED])), {}, ["7", "6", "5", "4", "2"]),
    "ended ones": (
        Wanted(statuses=frozenset([JobStatus.FAILED, JobStatus.SUCCEEDED])),
        {},
        ["1", "0"],
    ),
    "an error": (Wanted(error_code="engine_error"), {}, ["0"]),
    "a colour": (Wanted(metadata={"colour": "red"}), {}, ["7", "5", "3", "1"]),
    "a colour and a size": (Wanted(metadata={"colour": "blue", "size": "1"}), {}, ["6", "4", "2"]),
    "a size that none has": (Wanted(metadata={"colour": "red", "size": "1"}), {}, []),
    "later ones": (Wanted(created_after_ms=START + 2000), {}, ["7", "6"]),
    "earlier ones": (Wanted(created_before_ms=START + 1000), {}, ["1", "0"]),
    "those between": (
        Wanted(created_after_ms=START, created_before_ms=START + 2000),
        {},
        ["3", "2"],
    ),
    "earlier ones, by page": (
        Wanted(created_before_ms=START + 2000),
        {"max_jobs": 3},
        ["3", "2", "1", "after 1"],
    ),
    "earlier ones, behind one": (
        Wanted(created_before_ms=START + 2000),
        {"after": "job-0-2"},
        ["1", "0"],
    ),
    "earlier ones, behind a younger": (
        Wanted(created_before_ms=START + 2000),
        {"after": "job-0-6"},
        ["3", "2", "1", "0"],
    ),
    "behind a place": (
        Wanted(),
        {"after": f"{START + 1000} job-0-3", "max_jobs": 2},
        ["2", "1", f"after {START} job-0-1"],
    ),
    "behind a place of no job": (
        Wanted(),
        {"after": f"{START + 1000} job-0-x"},
        ["3", "2", "1", "0"],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_has_what_is_wanted_the_youngest_first(world: World, name: str) -> None:
    wanted, terms, expected = LISTS[name]
    some_jobs(world)
    assert world.listed(**({"tenant": "t", "wanted": wanted} | terms)) == expected


def test_totals_count_each_transition_once(world: World) -> None:
    """By lane, and by bucket of a histogram; the sums in microseconds."""
    running(world, num_events=0)
    world.pass_time(0.3)
    world.append("a", 2)
    world.append("a", 1)
    world.append("a", 1)
    world.pass_time(2)
    world.append("a", 1, "succeeded")
    running(world, "b", 1)
    world.pass_time(1)
    world.append("b", 1, "failed")
    world.submit("c", lane="batch")
    world.cancel("c")
    found = world.run(world.functions.snapshot("m", LANES)).totals
    lane = "interactive"
    wanted = {
        f"attempts_total:{lane}": 2,
        f"prompt_tokens_total:{lane}": 6,
        f"generation_tokens_total:{lane}": 7,
        f"requests_total:{lane}:succeeded": 1,
        f"requests_total:{lane}:failed": 1,
        "requests_total:batch:cancelled": 1,
        f"request_queue_time_seconds:{lane}:1": 2,
        f"request_queue_time_seconds:{lane}:sum": 0,
        f"time_to_first_token_seconds:{lane}:1": 1,
        f"time_to_first_token_seconds:{lane}:7": 1,
        f"time_to_first_token_seconds:{lane}:sum": 300_000,
        f"e2e_request_latency_seconds:{lane}:9": 1,
        f"e2e_request_latency_seconds:{lane}:sum": 2_300_000,
    }
    assert {name: value for name, value in found.items() if value or "sum" in name} == wanted


def test_a_worker_s_own_counts_are_added_once(world: World) -> None:
    for counted in ({"x": 3}, {"x": 3}, {"x": 5, "y": 1}, {"x": 4}):
        world.beat(counted=counted)
    world.beat("x", counted={"x": 1})
    found = world.run(world.functions.snapshot("m", LANES)).totals
    assert {name: found[name] for name in "xy"} == {"x": 6, "y": 1}


def test_lanes_are_told_as_they_are(world: World) -> None:
    """Waiting and running jobs and tokens, and how long the first has waited."""
    running(world)
    world.pass_time(1)
    world.submit("b")
    world.pass_time(2)
    world.submit("c", "u", cap=20)
    found = world.run(world.functions.snapshot("m", LANES)).lanes[LANES[0]]
    assert (found.num_queued, found.queued_tokens) == (2, 36)
    assert (found.num_running, found.running_tokens, found.oldest_wait_s) == (1, 13, 2.0)
    world.release("a")
    found = world.run(world.functions.snapshot("m", LANES)).lanes[LANES[0]]
    assert (found.num_queued, found.oldest_wait_s) == (3, 3.0)
    watched = world.run(world.functions.watch("m", LANES))
    assert [(each.tenant, each.num_jobs, each.num_tokens) for each in watched.waiting] == [
        ("u", 1, 23),
        ("t", 1, 13),
    ]


def test_marks_are_noted_by_the_clock_of_redis(world: World) -> None:
    running(world)
    world.pass_time(2)
    world.append("a", marks=(JobMark("prefill", 900, 300, 3, 1500),))
    assert (
        world.field("a", "runs").splitlines()[1]
        == f"prefill {world.now_ms - 900} {world.now_ms - 300} 3 1500"
    )


def test_a_bill_is_what_was_used(world: World) -> None:
    """Charge and refund; what nobody claimed costs nothing."""
    world.submit("a", **{"limits": TenantLimits(concurrent_tokens=99)})
    world.cancel("a")
    running(world, "b", 2)
    world.cancel("b")
    assert world.field("a", "charge", "refund") == ["0", "13"]
    assert world.field("b", "charge", "refund") == ["5", "8"]
    assert 0 < world.redis("TTL", "tenant:t") <= 24 * 3600


# Bytes of the memory for jobs; jobs (tenant, lane) before; the refusal of one of `t` in `interactive`.
# A job takes 10,500 bytes or so, and lanes have a part of their own of a 32nd.
MEMORY: dict[str, tuple[int | str, list[tuple[str, str]], str]] = {
    "none": (0, [], "memory_full"),
    "any": ("free", [("t", "interactive")] * 3, "new"),
    "of one job": (9_000, [], "lane_full lane_memory None"),
    "of some": (120_000, [("t", "interactive")] * 2, "new"),
    "the rest is for others": (
        60_000,
        [("t", "interactive")] * 3,
        "tenant_quota tenant_memory 10.0",
    ),
    "of another tenant": (60_000, [("u", "interactive")] * 3, "new"),
    "all is taken": (40_000, [("u", "interactive")] * 3, "lane_full lane_memory 10.0"),
    "its own part": (400_000, [("u", "batch")] * 40, "new"),
    "more than its own part": (
        400_000,
        [("u", "batch")] * 31 + [("t", "interactive")],
        "lane_full lane_memory 10.0",
    ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_is_divided(world: World, name: str) -> None:
    room, before, expected = MEMORY[name]
    for i, (tenant, lane) in enumerate(before):
        assert world.submit(f"{i}", tenant, lane) == "new"
    world.run_job("first")
    world.delete("first")
    world.redis("SET", "memory", room)
    assert world.submit("job") == expected
    if expected.startswith(("lane_full", "tenant_quota")):
        assert world.quote("job") == expected


def test_results_that_are_old_give_way(world: World) -> None:
    """Of synchronous calls, fifteen seconds after their end, the oldest first, four at a time."""
    world.run_job("kept")
    for i in range(6):
        world.run_job(f"{i}", is_passing=True)
        world.pass_time(1)
    world.submit("call", is_passing=True)
    world.pass_time(8.999)
    world.redis("SET", "memory", 90_000)
    assert world.submit("early") == "lane_full lane_memory 10.0"
    assert world.status("0") == "succeeded"
    world.pass_time(4.001)
    world.redis("SET", "memory", 90_000)
    assert world.submit("job") == "new"
    assert [world.status(f"{i}") for i in range(6)] == ["none"] * 4 + ["succeeded"] * 2
    assert (world.status("kept"), world.status("call")) == ("succeeded", "queued")
    world.audit.check()
