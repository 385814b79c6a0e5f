"""Messages of callbacks: when they are posted, who may send them, and what becomes of them."""

from typing import Any

import pytest

from contract.callbacks import Callback, CallbackKind
from contract.outbox import Outcome, Taken
from tests.oracle.world import LEASE_S, TALKATIVE, URLS, World, job_id, name_of

KEEP_S, DELIVERED_KEEP_S = 7 * 86_400, 86_400


def ended(world: World, *names: str, tenant: str = "t", to: int = 0) -> None:
    """Jobs whose ends are due."""
    for name in names:
        world.submit(name, tenant, callback=URLS[to])
        world.cancel(name, tenant)


def start(world: World, taken: Taken) -> Any:
    return world.run(world.outbox.start(taken, lease_s=LEASE_S))


def renew(world: World, taken: Taken) -> bool:
    return world.run(world.outbox.renew(taken, lease_s=LEASE_S))


def state(world: World, name: str) -> str:
    return str(world.redis("HGET", f"out:{job_id(name)}", "state"))


def names(taken: list[Taken]) -> list[str]:
    return [name_of(each.job_id) for each in taken]


def test_a_job_s_messages_are_posted_as_its_callback_asks(world: World) -> None:
    """The start once, each second token, and the end; the newest replaces one that waits."""
    world.submit("a", callback=TALKATIVE)
    world.submit("b", callback=URLS[0])
    world.submit("c")
    assert world.due() == []
    world.claim()
    assert world.due() == ["a started"]
    for num, told in (
        (1, []),
        (1, ["a progress"]),
        (3, ["a progress"]),
        (0, []),
        (1, ["a progress"]),
    ):
        world.append("a", num)
        assert world.due() == told
    world.append("a", 2)
    world.append("a", 1)
    world.append("a", 1, "succeeded")
    assert world.due() == ["a succeeded"]
    world.release("b")
    world.claim()
    world.append("b", 4)
    assert world.due() == []
    world.cancel("b")
    world.cancel("c")
    assert world.due() == ["b cancelled"]
    world.submit("d", callback=TALKATIVE)
    world.claim()
    world.release("d")
    assert world.due() == ["d started"]
    world.claim()
    assert world.due() == [], "only the first claim is a start"
    world.audit.check()


def test_a_message_says_what_happened(world: World) -> None:
    world.submit("a", callback=URLS[0])
    world.claim()
    world.append("a", 2, "failed", message="it broke")
    [taken] = world.take()
    record = start(world, taken)
    assert (record.kind, record.code, record.message) == ("failed", "engine_error", "it broke")
    assert (record.num_prompt_tokens, record.num_output_tokens, record.number) == (3, 2, 1)
    assert (record.created_ms, record.at_ms) == (world.now_ms, world.now_ms)
    assert (record.callback, record.tenant, record.failures) == (URLS[0], "t", 0)


# What happens to a taken message, and the replies of start, renew and done to its first taker.
HOLDS: dict[str, tuple[Any, tuple[bool, bool, str], str]] = {
    "nothing": (lambda w: None, (True, True, "OK"), "delivered"),
    "it is renewed": (
        lambda w: (w.pass_time(9), renew(w, FIRST), w.pass_time(9)),
        (True, True, "OK"),
        "delivered",
    ),
    "it is started": (
        lambda w: (w.pass_time(9), start(w, FIRST), w.pass_time(9), w.take()),
        (True, True, "OK"),
        "delivered",
    ),
    "its lease lapses": (lambda w: w.pass_time(LEASE_S), (True, True, "OK"), "delivered"),
    "another takes it": (
        lambda w: (w.pass_time(LEASE_S), w.take()),
        (False, False, "FENCED"),
        "taken",
    ),
    "it is visited in time": (
        lambda w: (w.pass_time(LEASE_S - 0.001), w.take()),
        (True, True, "OK"),
        "delivered",
    ),
    "it was delivered": (lambda w: w.done(FIRST, "delivered"), (False, False, "OK"), "delivered"),
    "it is to be tried again": (lambda w: w.done(FIRST, "retry", 5), (False, False, "OK"), "due"),
    "it was given up": (lambda w: w.done(FIRST, "dead"), (False, False, "OK"), "dead"),
    "its record is gone": (
        lambda w: w.redis("DEL", f"out:{FIRST.job_id}"),
        (False, False, "GONE"),
        "None",
    ),
}
FIRST = Taken(job_id("a"), 1)


@pytest.mark.parametrize("name", HOLDS)
def test_one_attempt_holds_a_message(world: World, name: str) -> None:
    """Its start, its renewal and its outcome are refused where it is over; an outcome may be repeated."""
    event, replies, at_last = HOLDS[name]
    ended(world, "a")
    assert world.take() == [FIRST]
    event(world)
    found = bool(start(world, FIRST)), renew(world, FIRST)
    assert (*found, str(world.done(FIRST, "delivered"))) == replies
    assert state(world, "a") == at_last
    assert str(world.done(FIRST, "delivered")) == replies[2]
    if name != "its record is gone":
        world.audit.check()


OUTCOMES: dict[Outcome, tuple[str, str]] = {
    "delivered": ("delivered", "idle"), "retry": ("due", "due"), "dead": ("dead", "idle"),
}  # fmt: skip


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_is_kept_and_progress_is_not(world: World, outcome: Outcome) -> None:
    of_end, of_start = OUTCOMES[outcome]
    ended(world, "a")
    world.submit("b", callback=TALKATIVE)
    world.claim()
    for taken in world.take():
        assert world.done(taken, outcome, 5) == "OK"
    assert (state(world, "a"), state(world, "b")) == (of_end, of_start)
    failures = [world.redis("HGET", f"out:{job_id(name)}", "failures") for name in "ab"]
    assert failures == ["1" if outcome == "retry" else "0"] * 2
    assert world.redis("HEXISTS", f"out:{job_id('a')}", "callback") == (outcome != "delivered")
    kept_s = DELIVERED_KEEP_S if outcome == "delivered" else KEEP_S
    assert kept_s - 9 < world.redis("TTL", f"out:{job_id('a')}") <= kept_s
    assert world.redis("HGET", "deliveries", outcome) == "2"
    world.audit.check()
    if outcome == "retry":
        world.pass_time(4.999)
        assert world.take() == []
        world.pass_time(0.001)
        assert sorted(names(world.take())) == ["a", "b"]


def test_a_newer_message_waits_for_the_one_in_flight(world: World) -> None:
    """The attempt's outcome is that of the message that it began with."""
    world.submit("a", callback=TALKATIVE)
    world.claim()
    [taken] = world.take()
    world.append("a", 2)
    assert world.take() == []
    assert start(world, taken).kind == "progress", "an attempt sends the newest"
    assert world.done(taken, "delivered") == "OK"
    world.append("a", 2)
    [taken] = world.take()
    start(world, taken)
    world.append("a", 1, "succeeded")
    assert renew(world, taken)
    assert world.done(taken, "dead") == "SUPERSEDED"
    assert world.due() == ["a succeeded"]
    world.audit.check()


def test_a_destination_has_a_bound(world: World) -> None:
    """Of messages in flight; a slow one delays no other, and goes on when one of its is done."""
    ended(world, "a", "b", "c", "d")
    ended(world, "e", to=1)
    taken = world.take(50, 2)
    assert sorted(names(taken)) == ["a", "b", "e"]
    assert world.take(50, 2) == []
    ended(world, "f")
    assert world.take(50, 2) == [], "a new message does not pass the bound"
    world.done(next(each for each in taken if each.job_id == job_id("a")), "delivered")
    assert len(world.take(50, 2)) == 1
    world.pass_time(LEASE_S)
    assert len(world.take(50, 1)) == 2, "one for each destination"
    world.audit.check()


def test_tenants_take_turns_and_leave_a_place(world: World) -> None:
    """A tenant has at most four times the places that remain."""
    for i in range(9):
        world.submit(f"t{i}", callback=Callback(kind=CallbackKind.URL, target=f"https://{i}/"))
        world.cancel(f"t{i}")
    ended(world, "u0", "u1", tenant="u")
    world.pass_time(1)
    assert sorted(name[0] for name in names(world.take(4, 2))) == ["t", "t", "u"]
    assert sorted(name[0] for name in names(world.take(3, 2))) == ["t", "u"]
    assert [len(world.take(room, 2)) for room in (1, 2, 2, 2, 50)] == [0, 1, 0, 0, 5]
    world.pass_time(LEASE_S)
    assert sorted(name[0] for name in names(world.take(2, 2))) == ["t", "u"], (
        "lapsed leases are free"
    )
    world.audit.check()


def test_one_place_is_for_a_tenant_without_any(world: World) -> None:
    ended(world, "a", "b")
    assert names(world.take(1)) == ["a"]
    assert names(world.take(1)) == []
    ended(world, "u", tenant="u", to=1)
    assert names(world.take(1)) == ["u"]


REPLAYS: dict[str, tuple[Any, str]] = {
    "it waits": (lambda w: None, "due"),
    "it is in flight": (lambda w: w.take(), "taken"),
    "it was delivered": (lambda w: w.done(w.take()[0], "delivered"), "delivered"),
    "it was given up": (lambda w: w.done(w.take()[0], "dead"), "due"),
    "there is none": (lambda w: w.redis("DEL", f"out:{job_id('a')}"), "None"),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_a_dead_letter_is_replayed_for_its_tenant(world: World, name: str) -> None:
    """With a new series of attempts; then it is dead no more."""
    event, expected = REPLAYS[name]
    ended(world, "a")
    event(world)
    dead = name == "it was given up"
    letters = world.run(world.outbox.dead("t"))
    assert [letter.record.job_id for letter in letters] == [job_id("a")] * dead
    assert world.run(world.outbox.dead("u")) == []
    assert world.run(world.functions.watch("m", ())).num_dead_callbacks == dead
    assert world.run(world.outbox.replay(job_id("a"), "u")) is None
    assert str(world.run(world.outbox.replay(job_id("a"), "t"))) == expected
    assert world.run(world.outbox.dead("t")) == []
    if dead:
        assert world.redis("ZCARD", "dead:") == 0
        assert world.redis("HGET", f"out:{job_id('a')}", "failures") == "0"
        assert world.due() == ["a cancelled"]
    if expected != "None":
        world.audit.check()


def test_letters_are_listed_the_youngest_first(world: World) -> None:
    ended(world, "a", "b", "c")
    ended(world, "u", tenant="u", to=1)
    for taken in world.take(50, 9):
        world.done(taken, "dead")
        world.pass_time(1)

    def dead(**terms: Any) -> list[str]:
        letters = world.run(world.outbox.dead("t", **terms))
        return [name_of(letter.record.job_id) for letter in letters]

    listed = dead()
    assert sorted(listed) == ["a", "b", "c"]
    [oldest] = world.run(world.outbox.dead("t", job_id=job_id(listed[2])))
    assert (name_of(oldest.record.job_id), oldest.died_ms) == (listed[2], world.now_ms - 4000)
    assert dead(limit=2) == listed[:2]
    assert dead(job_id=job_id("u")) == []
    middle = world.run(world.outbox.dead("t", job_id=job_id(listed[1])))[0].died_ms
    assert dead(before_ms=middle) == listed[2:]
    assert dead(before_ms=middle + 1) == listed[1:]
    watched = world.run(world.functions.watch("m", ()))
    assert (watched.num_due_callbacks, watched.num_dead_callbacks) == (0, 4)
    world.pass_time(KEEP_S)
    assert world.run(world.functions.watch("m", ())).num_dead_callbacks == 0
    ended(world, "d")
    world.done(world.take()[0], "dead")
    assert world.redis("ZCARD", "dead:t") == 1, "old ones go"


def test_messages_that_wait_are_counted(world: World) -> None:
    ended(world, "a", "b")
    ended(world, "c", to=1)
    ended(world, "u", tenant="u")
    world.take(1)
    assert world.run(world.functions.watch("m", ())).num_due_callbacks == 3
