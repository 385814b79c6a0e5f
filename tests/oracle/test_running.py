"""What workers and callers may do with a job in each state, and what the functions count of it.

A job of `t` costs 10 tokens, of which 7 are output, and lasts 600 s; a lease 10 s.
"""

from typing import Any

import pytest

from contract.function_types import JobMark, Wanted
from contract.jobs import JobStatus
from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import LANES, NOW_MS, REF, World, job_id


@scripts("""
the next event: append t1 -> OK 5
several tokens: append t1 4 -> OK 5
one token too many: append t1 5 -> OVER 3
no tokens: append t1 0 -> OK 4
the last event again: append t1 1 shift=-1 -> OK 4
a gap: append t1 1 shift=1 -> GAP 4
an end: append t1 1 succeeded -> OK 6
an end alone: append t1 0 failed -> OK 5
an end after a gap: append t1 1 failed shift=1 -> GAP 4
an earlier claim: append t1 1 epoch=0 -> FENCED 0
a later claim: append t1 1 epoch=2 -> FENCED 0
another worker: append t1 1 worker=x -> FENCED 0
it waits: release t1; append t1 -> FENCED 0
it runs elsewhere: release t1; claim x; append t1 -> FENCED 0
it came back: release t1; claim loses_reply=True; append t1 -> FENCED 0
no such job: cancel t1; delete t1; append t1 -> GONE 0
a cancelled job: cancel t1; append t1 -> cancelled 0
an ended job: append t1 1 succeeded; append t1 -> succeeded 0
in time: pass_time 599.999; append t1 -> OK 5
at its deadline: pass_time 600; append t1 -> expired 0
past its former deadline: detach t1 700 9; pass_time 650; append t1 -> OK 5
an ended job leaves no packed progress: append t1 1 succeeded; redis EXISTS run:w -> 0
a lapsed lease that nobody took: pass_time 10; append t1 -> OK 5
each item has its own verdict
  unsound; start t2 t3 t4 t5 events=2; cancel t2; cancel t5
  two t1 t2 t3. t4 t4+ t5 -> OK 5 cancelled 0 OK 5 OK 4 OK 5 cancelled 0
a refused one leaves the log as it is
  append t1 1 shift=1; append t1 5; append t1 1 worker=x; log t1 -> 1 2 3
""")
def test_an_event_is_appended_once_by_its_holder(calls: Calls, script: list[str]) -> None:
    calls.run(["start t1 events=3", *script])


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_an_event_renews_the_lease_where_it_is_asked_to(calls: Calls, num_events: int) -> None:
    calls.run(
        [
            f"start t1 t2 events={num_events}",
            "pass_time 9; append t1; append t2 1 lease_s=0; sweep -> 0 0 0 0",
            "pass_time 1; sweep -> 1 0 0 0",
            "status t2 -> queued",
            "pass_time 8; sweep -> 0 0 0 0",
            "pass_time 1; sweep -> 1 0 0 0",
        ]
    )


@pytest.mark.parametrize("num_events", [0, 1, 3])
@scripts("""
released: release t1; claim x -> t1
given back with an error: release t1 error; claim x -> t1
blamed: blame t1 3; claim x -> t1
lapsed: pass_time 10; sweep; claim x jobs=1 -> t1
taken by another: release t1 offer; claim x -> t1
cancelled: cancel t1 -> cancelled
expired: pass_time 600; sweep -> 0 2 0 0
failed: append t1 0 failed; status t1 -> failed
moved: move t1 batch 900; field t1 lane -> batch
given another deadline: move t1 '' 900; since t1 deadline -> -900.0
detached: detach t1 900 900; since t1 deadline -> -900.0
offered: release t1 offer -> OK
swept in time: sweep -> 0 0 0 0
""")
def test_progress_is_kept_whatever_becomes_of_a_job(
    calls: Calls, world: World, script: list[str], num_events: int
) -> None:
    """Callers see every event at once, and the next holder goes on behind the last."""
    calls.run([f"start t1 events={num_events}; start t2", *script])
    if "t1" in world.held["x"]:
        assert world.append("t1", worker="x") == f"OK {num_events + 2}"
        assert world.append("t1") == "FENCED 0"
    elif world.field("t1", "owner") != [""]:
        assert world.append("t1") == f"OK {num_events + 2}"
        calls.run([])
        assert world.view("t1").num_output_tokens == num_events + 1
        [view] = world.run(world.functions.list_jobs("t", Wanted(), after=job_id("t2"))).views  # type: ignore[union-attr]
        assert (view.num_output_tokens, view.next_number) == (num_events + 1, num_events + 2)
        watched = {each.job_id: each for each in world.run(world.functions.watch("m", LANES)).held}
        assert all(each.num_output_tokens <= num_events + 1 for each in watched.values())
    calls.run([])


@scripts("""
errors end a job and drains do not
  submit t1 max_attempts=2; claim; release t1; claim; release t1; claim; release t1; claim
  release t1 error -> OK
  claim; release t1 error -> failed
  field t1 attempt releases code -> 2 3 engine_error
nobody's: release t1 -> GONE
nobody's offer: release t1 offer -> GONE
nobody's crash: blame t1 -> GONE
it waits: submit t1; release t1 -> FENCED
it waits, offered: submit t1; release t1 offer -> FENCED
it waits, blamed: submit t1; blame t1 -> FENCED
another's: start t1; release t1 drain x -> FENCED
too late: start t1; pass_time 600; release t1 -> expired
too late to offer: start t1; pass_time 600; release t1 offer -> expired
too late to blame: start t1; pass_time 600; blame t1 -> expired
in time to blame: start t1; pass_time 599.999; blame t1 -> OK
ended: start t1; cancel t1; release t1 -> cancelled
poison at its only crash: start t1; blame t1 1 -> failed
poison at the third crash, and alone before
  start t1; blame t1 3; claim is_idle=True -> t1
  blame t1 3; claim is_idle=True -> t1!
  blame t1 3 -> failed
  field t1 code crashes -> poison 3
  redis HGET poison job-0-t1 -> {}
a lease lapses once for company, then alone
  start t1; pass_time 9.999; sweep -> 0 0 0 0
  pass_time 0.001; sweep -> 1 0 0 0
  claim is_idle=True -> t1
  pass_time 10; sweep; claim is_idle=True -> t1!
  field t1 lapses -> 2
""")
def test_jobs_are_given_back(calls: Calls, script: list[str]) -> None:
    calls.run(script)


def test_a_job_is_released_thirty_two_times(calls: Calls) -> None:
    again = "claim; release t1 -> OK"
    end = ["claim; release t1 -> failed", "field t1 code attempt -> retries 1"]
    calls.run(["submit t1", *[again] * 32, *end])


@scripts("""
a heartbeat renews what a worker holds, and names what it does not
  start t1 t2 t3 t4; cancel t2; release t3; claim x; release t4; claim loses_reply=True
  pass_time 9; beat -> t2 t3 t4
  pass_time 2; sweep -> 2 0 0 0
  status t1 -> claimed
a worker finds what a lost reply gave it
  start t1; submit t2; claim loses_reply=True; pass_time 9; mine x -> -
  mine -> t2
  mine -> -
  pass_time 2; sweep -> 1 0 0 0
  append t2 -> OK 2
after a restart of Redis leases and attendance last for a grace
  start t1; submit t2 attendance_s=5; sweep; redis SET runid 'another 0'; pass_time 11
  sweep -> 0 0 0 0
  submit t3 deadline_s=1; pass_time 9.999; sweep -> 0 1 0 0
  pass_time 0.001; sweep -> 1 0 1 0
an order to drain reaches live workers
  beat; drain w x -> True False
  redis HGET worker:w order -> drain
  redis EXISTS worker:x -> 0
a pool has the means of its live workers
  beat w 10 jobs=4 tokens=100; beat x 30 jobs=2; beat y
  redis HMGET pool:m tokens_per_s max_jobs max_tokens -> 20 3 100
  submit t1 cost=120; place t2 -> 1 120 0.0
  beat x state=draining; beat y state=draining; place t3 cost=200 -> 2 130 13.0
a pool that has measured nothing has no rate, and one that did keeps it
  beat w; redis HGET pool:m tokens_per_s -> None
  beat w 10; beat w; redis HGET pool:m tokens_per_s -> 10
a detached job needs no caller, and nothing gets shorter
  submit t1 t2 attendance_s=5 deadline_s=50 retention_s=70 is_ephemeral=True; attend t1 t9 -> 1
  detach t1 40 60 -> OK
  field t1 ttl_ms passing -> 70000 None
  since t1 deadline -> -50.0
  pass_time 5; sweep -> 0 0 1 0
  status t1 -> queued
  attend t1 -> 0
  detach t1 90 80; field t1 ttl_ms -> 80000
  since t1 deadline -> -90.0
an attended job goes on
  submit t1 attendance_s=5; submit t2; pass_time 4; attend t1 t2 -> 1
  pass_time 4.999; sweep -> 0 0 0 0
  pass_time 0.001; sweep -> 0 0 1 0
  attend t1; redis EXISTS attended -> 0
an ended job is forgotten after its retention, and its objects are orphaned
  run_job t1 retention_s=20; run_job t2 retention_s=20 is_stored=True; run_job t3 retention_s=20
  redis TTL job:job-0-t1 -> 20
  redis TTL log:job-0-t1 -> 20
  delete t3; redis SCARD orphaned -> 0
  pass_time 19.999; sweep -> 0 0 0 0
  pass_time 0.001; sweep -> 0 0 0 2
  redis SMEMBERS orphaned -> job-0-t2
a sweep has a bound
  submit t1 t2 t3 deadline_s=1; pass_time 1; sweep 2 -> 0 2 0 0
  sweep 2 -> 0 1 0 0
""")
def test_time_passes_for_jobs_and_workers(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
cancel
  cancel t2 -> cancelled
  cancel t1 -> cancelled
  cancel t0 -> succeeded
  cancel u1 t -> None
  cancel t9 -> None
delete
  delete t2 -> queued
  delete t1 -> streaming
  delete t0 t -> True
  delete u1 t -> False
  delete t9 -> False
detach
  detach t2 5 5 -> OK
  detach t1 5 5 -> OK
  detach t0 5 5 -> succeeded
  detach u1 5 5 t -> None
move
  move t2 batch -> OK
  move t1 batch -> OK
  move t0 batch -> succeeded
  move u1 batch tenant=t -> None
read
  status t2 -> queued
  status t1 -> streaming
  status u1 t -> none
  status t9 -> none
""")
def test_a_caller_s_call_on_a_job_of_each_state(calls: Calls, script: list[str]) -> None:
    """One that waits, runs, has ended; another's, and none."""
    calls.run(["run_job t0; start t1 events=1; submit t2 u1", *script])


def heard(world: World, channel: str, calls: Calls, script: list[str]) -> list[str]:
    """The messages that were published meanwhile."""
    with world.client.pubsub(ignore_subscribe_messages=True) as told:  # type: ignore[no-untyped-call]
        told.subscribe(world.keys.of(*channel.split()))
        told.get_message(timeout=5)
        calls.run(script)
        told.ping()  # its reply follows all earlier messages
        said = []
        while (message := told.get_message(timeout=5)) is None or message["type"] != "pong":
            said += [message["data"].decode().replace("job-0-", "")] if message else []
        return said


def test_a_worker_is_told_what_becomes_of_its_jobs(world: World, calls: Calls) -> None:
    script = ["start t1 t2 t3 t4; cancel t1; move t2 batch 5; move t2 '' 7; detach t3 700 5"]
    script += ["release t4 offer; claim x; beat; drain w; pass_time 7; sweep"]
    assert heard(world, "ctl w", calls, script) == [
        *("ended t1 cancelled", "moved t2 batch 5000", "moved t2 batch 7000"),
        *("moved t3 interactive 700000", "taken t4 1", "drain", "ended t2 expired"),
    ]


def test_workers_are_told_what_waits(world: World, calls: Calls) -> None:
    script = ["submit t1; claim; release t1; claim; move t1 batch; blame t1 3"]
    script += ["pause batch; resume batch; submit u1 lane_bound_tokens=1"]
    assert heard(world, "wake m", calls, script) == ["interactive"] * 2 + ["batch"] * 2


def some_jobs(world: World) -> None:
    """Eight jobs of t, the oldest first, two in each second, some of them chats; one of u."""
    for i in range(8):
        metadata = {"colour": "red"} if i % 2 else {"colour": "blue", "size": "1"}
        lane, model = LANES[i % 3 == 2], "n" if i == 5 else "m"
        terms = {"lane": lane, "model": model, "is_chat": i in (1, 4, 5, 6)}
        terms |= {"metadata": metadata if i else {}, "route": "r" if i == 3 else ""}
        world.submit(f"t{i}", **terms)
        world.pass_time(i % 2)
    world.claim(jobs=3)
    world.append("t0", 1, "failed")
    world.append("t1", 1, "succeeded")
    world.submit("u1")


def wanted(**terms: Any) -> Wanted:
    times = {name: NOW_MS + 1000 * terms.pop(name) for name in ("since", "before") if name in terms}
    names = {"since": "created_after_ms", "before": "created_before_ms"}
    return Wanted(**terms, **{names[name]: ms for name, ms in times.items()})


OLDEST = wanted(is_ascending=True)
ENDED = frozenset([JobStatus.FAILED, JobStatus.SUCCEEDED])
LISTS: dict[str, tuple[Wanted, dict[str, Any], str]] = {
    "all": (wanted(), {}, "7 6 5 4 3 2 1 0"),
    "of another": (wanted(), {"tenant": "u"}, "u1"),
    "of all": (wanted(), {"tenant": "", "max_jobs": 2}, "u1 7 after:7"),
    "of nobody": (wanted(), {"tenant": "v"}, ""),
    "a page": (wanted(), {"max_jobs": 3}, "7 6 5 after:5"),
    "the next page": (wanted(), {"max_jobs": 3, "after": "job-0-t5"}, "4 3 2 after:2"),
    "the last page": (wanted(), {"max_jobs": 3, "after": "job-0-t2"}, "1 0"),
    "behind the last": (wanted(), {"after": "job-0-t0"}, ""),
    "behind none": (wanted(), {"after": "job-0-t9"}, "none"),
    "behind another's": (wanted(), {"after": "job-0-u1"}, "none"),
    "few looks": (wanted(lanes=frozenset(["batch"])), {"max_looks": 2}, "after:6"),
    "a lane": (wanted(lanes=frozenset(["batch"])), {}, "5 2"),
    "lanes": (wanted(lanes=frozenset(LANES)), {"max_jobs": 2}, "7 6 after:6"),
    "a model": (wanted(model="n"), {}, "5"),
    "ended ones": (wanted(statuses=ENDED), {}, "1 0"),
    "an error": (wanted(error_code="engine_error"), {}, "0"),
    "a colour": (wanted(metadata={"colour": "red"}), {}, "7 5 3 1"),
    "a colour and a size": (wanted(metadata={"colour": "blue", "size": "1"}), {}, "6 4 2"),
    "a size that none has": (wanted(metadata={"colour": "red", "size": "1"}), {}, ""),
    "later ones": (wanted(since=2), {}, "7 6"),
    "earlier ones": (wanted(before=1), {}, "1 0"),
    "those between": (wanted(since=0, before=2), {}, "3 2"),
    "earlier ones, by page": (wanted(before=2), {"max_jobs": 3}, "3 2 1 after:1"),
    "earlier ones, behind one": (wanted(before=2), {"after": "job-0-t2"}, "1 0"),
    "earlier ones, behind a younger": (wanted(before=2), {"after": "job-0-t6"}, "3 2 1 0"),
    "behind a place of no job": (wanted(), {"after": f"{NOW_MS + 1000} job-0-t31"}, "3 2 1 0"),
    "behind a place": (
        wanted(),
        {"after": f"{NOW_MS + 1000} job-0-t3", "max_jobs": 2},
        f"2 1 after:{NOW_MS} job-0-t1",
    ),
    "of a route": (wanted(model="r"), {}, "3"),
    "of the model that it chose": (wanted(model="m"), {}, "7 6 4 3 2 1 0"),
    "chats": (wanted(is_chats=True), {}, "6 5 4 1"),
    "a page of chats": (wanted(is_chats=True), {"max_jobs": 2}, "6 5 after:5"),
    "chats that ended": (wanted(is_chats=True, statuses=ENDED), {}, "1"),
    "chats behind what is none": (wanted(is_chats=True), {"after": "job-0-t3"}, "none"),
    "chats of nobody": (wanted(is_chats=True), {"tenant": "u"}, ""),
    "oldest first": (OLDEST, {}, "0 1 2 3 4 5 6 7"),
    "oldest first, a page": (OLDEST, {"max_jobs": 3}, "0 1 2 after:2"),
    "oldest first, the next page": (OLDEST, {"max_jobs": 3, "after": "job-0-t2"}, "3 4 5 after:5"),
    "oldest first, the last page": (OLDEST, {"max_jobs": 3, "after": "job-0-t5"}, "6 7"),
    "oldest first, few looks": (OLDEST, {"max_looks": 2, "after": "job-0-t1"}, "2 3 after:3"),
    "oldest first, behind a place": (OLDEST, {"after": f"{NOW_MS + 1000} job-0-t31"}, "4 5 6 7"),
    "oldest chats first": (
        wanted(is_chats=True, is_ascending=True),
        {"max_jobs": 2, "after": "job-0-t1"},
        "4 5 after:5",
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_has_what_is_wanted_in_order(world: World, name: str) -> None:
    want, terms, expected = LISTS[name]
    some_jobs(world)
    options: dict[str, Any] = {"tenant": "t", "wanted": want} | terms
    found = world.listed(**options)
    words = [word.removeprefix("t").replace(":t", ":") for word in found]
    assert " ".join(words) == expected


def test_totals_count_each_transition_once(world: World, calls: Calls) -> None:
    """By lane, and by bucket of a histogram; the sums in microseconds."""
    calls.run(["start t1; pass_time 0.3; append t1 2; append t1; append t1; pass_time 2"])
    calls.run(["append t1 1 succeeded; start t2 events=1; pass_time 1; append t2 1 failed"])
    calls.run(["submit t3 lane=batch; cancel t3"])
    found = world.run(world.functions.snapshot("m", LANES)).totals
    shown = {name: value for name, value in found.items() if value or "sum" in name}
    assert {name.replace("interactive", "i"): value for name, value in shown.items()} == {
        "attempts_total:i": 2,
        "prompt_tokens_total:i": 6,
        "generation_tokens_total:i": 7,
        "requests_total:i:succeeded": 1,
        "requests_total:i:failed": 1,
        "requests_total:batch:cancelled": 1,
        "request_queue_time_seconds:i:1": 2,
        "request_queue_time_seconds:i:sum": 0,
        "time_to_first_token_seconds:i:1": 1,
        "time_to_first_token_seconds:i:7": 1,
        "time_to_first_token_seconds:i:sum": 300_000,
        "e2e_request_latency_seconds:i:9": 1,
        "e2e_request_latency_seconds:i:sum": 2_300_000,
    }


def test_a_worker_s_own_counts_are_added_once(world: World) -> None:
    for counted in ({"x": 3}, {"x": 3}, {"x": 5, "y": 1}, {"x": 4}):
        world.beat(counted=counted)
    world.beat("x", counted={"x": 1})
    found = world.run(world.functions.snapshot("m", LANES)).totals
    assert {name: found[name] for name in "xy"} == {"x": 6, "y": 1}


def test_lanes_and_workers_are_told_as_they_are(world: World, calls: Calls) -> None:
    """How long the first has waited; since when a worker claims no jobs, by its first heartbeat."""

    def seen(script: str) -> tuple[Any, ...]:
        calls.run([script])
        found = world.run(world.functions.snapshot("m", LANES))
        lane = found.lanes[LANES[0]]
        aside = [(each.worker.incarnation, each.state, each.for_s) for each in found.aside]
        lives = [worker.incarnation for worker in found.workers]
        return (
            lane.num_queued,
            lane.queued_tokens,
            lane.num_running,
            lane.oldest_wait_s,
            lives,
            aside,
        )

    said = seen("start t1; pass_time 1; submit t2; pass_time 2; submit u3 cost=20; beat w; beat x")
    assert said == (2, 30, 1, 2.0, ["w", "x"], [])
    said = seen("release t1; beat w state=draining; pass_time 4; beat w state=draining")
    assert said == (3, 40, 0, 7.0, ["x"], [("w", "draining", 4.0)])
    assert seen("beat w state=loading")[5] == [("w", "loading", 4.0)]
    assert seen("beat w; beat x state=gone")[4:] == (["w"], [])
    assert seen("beat w state=draining; beat w state=gone")[4:] == ([], [])
    assert seen("beat w; pass_time 15")[4] == ["w"]
    assert seen("pass_time 0.001")[4] == []
    waiting = world.run(world.functions.watch("m", LANES)).waiting
    assert sorted((each.tenant, each.num_jobs, each.num_tokens) for each in waiting) == [
        ("t", 1, 10),
        ("u", 1, 20),
    ]


def test_marks_are_noted_by_the_clock_of_redis(world: World, calls: Calls) -> None:
    calls.run(["start t1; pass_time 2"])
    world.append("t1", marks=(JobMark("prefill", 900, 300, 3, 1500),))
    [runs] = world.field("t1", "runs")
    claim, mark = runs.splitlines()
    assert claim == f"{world.now_ms - 2000} 1 w"
    assert mark == f"prefill {world.now_ms - 900} {world.now_ms - 300} 3 1500"


def test_of_a_log_that_is_kept_elsewhere_the_end_stays(world: World, calls: Calls) -> None:
    calls.run(["start t1 events=3"])
    assert world.append("t1", 1, "succeeded", result=REF) == "OK 6"
    calls.run(["log t1 -> succeeded", "delete t1; redis SMEMBERS orphaned -> job-0-t1"])


@scripts("""
none: redis SET memory 0; submit t9 -> memory_full
any: submit t1 t2 t3; redis SET memory free; ask t9 -> OK
less than of one job: redis SET memory 9000; ask t9 -> lane_full lane_memory None
of some: submit t1 t2; redis SET memory 120000; ask t9 -> OK
the rest is for others
  submit t1 t2 t3; redis SET memory 60000; ask t9 -> tenant_quota tenant_memory 10.0
one of the others: submit u1 u2 u3; redis SET memory 60000; ask t9 -> OK
almost all is taken: submit u1 u2 u3; redis SET memory 51000; ask t9 -> lane_full lane_memory 10.0
all is taken: submit u1 u2 u3; redis SET memory 40000; ask t9 -> lane_full lane_memory 10.0
""")
def test_the_memory_is_divided(calls: Calls, script: list[str]) -> None:
    """A job takes 10,300 bytes or so. (The first one reads what Redis holds.)"""
    calls.run(["run_job t0; delete t0", *script])


def test_each_lane_has_a_part_of_the_memory_of_its_own(calls: Calls) -> None:
    """However much others hold: one of 32, here 12,500 bytes."""
    others = "submit " + " ".join(f"u{i}" for i in range(40)) + " lane=batch"
    calls.run(["run_job t0; delete t0", others, "redis SET memory 400000"])
    calls.run(["submit t8 -> new", "submit t9 -> lane_full lane_memory 10.0"])


def test_results_that_are_old_give_way(world: World, calls: Calls) -> None:
    """Of synchronous calls, fifteen seconds after their end, the oldest first, four at a time."""
    calls.run(["run_job t9"])
    for i in range(6):
        calls.run([f"run_job t{i} is_ephemeral=True; pass_time 1"])
    calls.run(["submit u1 is_ephemeral=True; pass_time 8.999; redis SET memory 90000"])
    calls.run(["submit t8 -> lane_full lane_memory 10.0", "status t0 -> succeeded"])
    calls.run(
        ["pass_time 4.001; redis SET memory 90000; submit t8 -> new", "status t9 -> succeeded"]
    )
    assert [world.status(f"t{i}") for i in range(6)] == ["none"] * 4 + ["succeeded"] * 2
