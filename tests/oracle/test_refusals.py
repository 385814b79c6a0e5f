"""Which jobs are accepted: each refusal with its time of a retry, their order, and what is predicted."""

from collections.abc import Callable
from typing import Any

import pytest

from contract.function_types import TenantLimits
from tests.oracle.walk import contents
from tests.oracle.world import LANES, NOW_MS, World

COST = 13  # of a job with default terms: a prompt of 3 tokens and 10 of output


def crowd(world: World, num: int = 2, *, lane: str = LANES[0], tenant: str = "t") -> None:
    """A worker that computes 13 tokens/s, and waiting jobs."""
    world.beat(rate=13.0, jobs=1, tokens=13)
    for i in range(num):
        assert world.submit(f"{lane}{tenant}{i}", tenant, lane) == "new"


def shared(world: World) -> None:
    """As `crowd`, with a waiting job of a lane that is guaranteed half of the rate."""
    crowd(world)
    world.beat(rate=13.0, jobs=1, tokens=13, shares={"batch": 0.5})
    world.submit("b", "u", "batch")


def limits(**limits: Any) -> dict[str, Any]:
    return {"limits": TenantLimits(**limits)}


def announced(ms: int) -> Callable[[World], None]:
    """No worker lives; the next is to be ready in so many ms."""

    def announce(world: World) -> None:
        world.redis("HSET", "pool:m", "ready_at", NOW_MS + ms)

    return announce


def paused(lane: str, tenant: str) -> Callable[[World], None]:
    return lambda world: world.pause(lane, tenant)


def used(requests: int, tokens: int, seconds: float) -> Callable[[World], None]:
    """The tenant's meters so long ago."""

    def use(world: World) -> None:
        crowd(world, 0)
        ago = NOW_MS - seconds * 1000
        fields = ("requests", requests, "requests_ms", ago, "tokens", tokens, "tokens_ms", ago)
        world.redis("HSET", "tenant:t", "reserved", 0, *fields)
        world.redis("EXPIRE", "tenant:t", 9)

    return use


REFUSALS: dict[str, tuple[Callable[[World], Any], dict[str, Any], str]] = {
    "a lane that no worker serves": (
        lambda w: w.beat(lanes=("batch", "other")),
        {},
        "unknown_lane batch other None",
    ),
    "a lane that one of several serves": (lambda w: w.beat(lanes=("batch", LANES[0])), {}, "OK"),
    "a paused lane": (paused(LANES[0], ""), {}, "lane_paused - 30.0"),
    "another paused lane": (paused("batch", ""), {}, "OK"),
    "a paused tenant": (paused("", "t"), {}, "lane_paused - 30.0"),
    "another paused tenant": (paused("", "u"), {}, "OK"),
    "a tenant paused in a lane": (paused(LANES[0], "t"), {}, "lane_paused - 30.0"),
    "a tenant paused in another": (paused("batch", "t"), {}, "OK"),
    "a pause of another model": (
        lambda w: w.redis("HSET", "paused", "n * t", f"{NOW_MS} operator"),
        {},
        "OK",
    ),
    "a pause of all models": (
        lambda w: w.redis("HSET", "paused", "* * t", f"{NOW_MS} operator"),
        {},
        "lane_paused - 30.0",
    ),
    "no worker": (lambda w: None, {"needs_worker": True}, "no_workers - None"),
    "no worker is needed": (lambda w: None, {}, "OK"),
    "a worker to come": (announced(5_000), {"needs_worker": True}, "no_workers - 5.0"),
    "a worker that comes now": (announced(500), {"needs_worker": True}, "no_workers - 1.0"),
    "a late worker": (announced(-60_000), {"needs_worker": True}, "no_workers - 1.0"),
    "one given up": (announced(-60_001), {"needs_worker": True}, "no_workers - None"),
    "a live worker": (crowd, {"needs_worker": True}, "OK"),
    "requests": (used(2, 0, 0), limits(requests_per_min=2), "tenant_quota requests_per_min 30.0"),
    "requests that leak": (used(2, 0, 30), limits(requests_per_min=2), "OK"),
    "requests of the future": (
        used(2, 0, -30),
        limits(requests_per_min=2),
        "tenant_quota requests_per_min 30.0",
    ),
    "tokens": (used(0, 30, 0), limits(tokens_per_min=42), "tenant_quota tokens_per_min 1.429"),
    "tokens that just fit": (used(0, 29, 0), limits(tokens_per_min=42), "OK"),
    "tokens that leak": (
        used(0, 42, 10),
        limits(tokens_per_min=42),
        "tenant_quota tokens_per_min 8.572",
    ),
    "tokens above the limit": (
        crowd,
        limits(tokens_per_min=12),
        "tenant_quota tokens_per_min None",
    ),
    "tokens at half the price": (
        used(0, 30, 0),
        limits(tokens_per_min=37) | {"lane": "batch", "batch_price": 0.5},
        "OK",
    ),
    "a job of the whole limit": (lambda w: None, limits(tokens_per_min=13), "OK"),
    "unfinished tokens": (
        crowd,
        limits(concurrent_tokens=30),
        "tenant_quota concurrent_tokens 0.693",
    ),
    "unfinished tokens that fit": (crowd, limits(concurrent_tokens=39), "OK"),
    "a job above the limit": (
        crowd,
        limits(concurrent_tokens=12),
        "tenant_quota concurrent_tokens None",
    ),
    "unfinished tokens, no rate": (
        lambda w: w.submit("a"),
        limits(concurrent_tokens=13),
        "tenant_quota concurrent_tokens None",
    ),
    "a share of the lane": (
        crowd,
        limits(lane_share=0.5) | {"lane_bound_tokens": 60},
        "tenant_quota lane_share 0.693",
    ),
    "a share that fits": (crowd, limits(lane_share=0.5) | {"lane_bound_tokens": 78}, "OK"),
    "a share of no bound": (crowd, limits(lane_share=0.1), "OK"),
    "a job above its share": (
        crowd,
        limits(lane_share=0.2) | {"lane_bound_tokens": 60},
        "tenant_quota lane_share None",
    ),
    "others in the lane": (
        lambda w: crowd(w, tenant="u"),
        limits(lane_share=0.5) | {"lane_bound_tokens": 60},
        "OK",
    ),
    "a full lane": (crowd, {"lane_bound_tokens": 30}, "lane_full lane_tokens 0.693"),
    "a full lane beside one with a share": (
        shared,
        {"lane_bound_tokens": 30},
        "lane_full lane_tokens 1.385",
    ),
    "a share of a lane beside one with a share": (
        shared,
        limits(lane_share=0.5) | {"lane_bound_tokens": 60},
        "tenant_quota lane_share 1.385",
    ),
    "a lane that is full then": (crowd, {"lane_bound_tokens": 39}, "OK"),
    "a job above the lane's bound": (
        crowd,
        {"lane_bound_tokens": 12},
        "lane_full lane_tokens None",
    ),
    "another full lane": (lambda w: crowd(w, lane="batch"), {"lane_bound_tokens": 30}, "OK"),
    "a long wait": (crowd, {"lane_bound_s": 1.5}, "lane_full lane_wait 0.5"),
    "a wait that is allowed": (crowd, {"lane_bound_s": 2.0}, "OK"),
    "a late end": (crowd, {"deadline_s": 1.5}, "deadline_infeasible - 0.5"),
    "an end in time": (crowd, {"deadline_s": 2.0}, "OK"),
    "a late end, no rate": (lambda w: [w.submit("a"), w.submit("b")], {"deadline_s": 0.5}, "OK"),
    "a cold start in time": (lambda w: None, {"cold_start_s": 9.0, "deadline_s": 9.0}, "OK"),
    "a late cold start": (
        lambda w: None,
        {"cold_start_s": 9.0, "deadline_s": 8.0},
        "deadline_infeasible - 1.0",
    ),
    "a longer run than its time": (
        lambda w: w.beat(rate=13.0, stream=2.0),
        {"deadline_s": 4.0, "expects": 9},
        "deadline_infeasible - None",
    ),
    "a run in time": (
        lambda w: w.beat(rate=13.0, stream=2.0),
        {"deadline_s": 4.5, "expects": 9},
        "OK",
    ),
    "a run of several choices": (
        lambda w: w.beat(rate=13.0, stream=2.0),
        {"deadline_s": 4.5, "expects": 9, "n": 2, "cap": 20},
        "OK",
    ),
    "a run of unknown length": (
        lambda w: w.beat(rate=13.0, stream=2.0),
        {"deadline_s": 4.0},
        "OK",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_quote_and_a_submission_say_the_same(world: World, name: str) -> None:
    """The refusal, its limit and its retry; what is refused writes nothing but its promise."""
    prepare, terms, expected = REFUSALS[name]
    prepare(world)
    before = contents(world)
    assert world.quote("job", **terms) == expected
    assert contents(world) == before
    assert world.submit("job", **terms) == ("new" if expected == "OK" else expected)
    if expected != "OK":
        assert contents(world) == before
        code = expected.split()[0]
        assert world.redis("HGET", "totals:m", f"refusals_total:{LANES[0]}:{code}") == "1"
    world.audit.check()


def test_the_first_reason_counts(world: World) -> None:
    """All reasons hold at once; then one after the other is gone."""
    world.beat(rate=13.0, jobs=1, tokens=13, lanes=("batch",))
    world.redis("HSET", "pool:m", "lanes", "interactive")
    assert world.submit("first", **limits(requests_per_min=1, tokens_per_min=14)) == "new"
    world.submit("second")
    world.redis("HSET", "pool:m", "lanes", "batch")
    world.redis("SET", "memory", 30_000)
    world.pause(LANES[0])
    world.pass_time(16)
    terms: dict[str, Any] = {"deadline_s": 0.5, "lane_bound_s": 0.4, "lane_bound_tokens": 30}
    terms |= {"max_tenant_stored_bytes": 1, "max_stored_bytes": 1, "needs_worker": True}
    bounds = {
        "requests_per_min": 1,
        "tokens_per_min": 14,
        "concurrent_tokens": 30,
        "lane_share": 0.5,
    }

    def gone(name: str) -> None:
        if name in bounds:
            del bounds[name]
        elif name in terms:
            del terms[name]

    for limit, term in (
        ("unknown_lane batch", ""),
        ("lane_paused -", ""),
        ("no_workers -", "needs_worker"),
        ("storage_full -", "max_stored_bytes"),
        ("tenant_quota stored_bytes", "max_tenant_stored_bytes"),
        ("tenant_quota requests_per_min", "requests_per_min"),
        ("tenant_quota tokens_per_min", "tokens_per_min"),
        ("tenant_quota concurrent_tokens", "concurrent_tokens"),
        ("tenant_quota lane_share", "lane_share"),
        ("lane_full lane_memory", ""),
        ("lane_full lane_tokens", "lane_bound_tokens"),
        ("lane_full lane_wait", "lane_bound_s"),
        ("deadline_infeasible -", "deadline_s"),
        ("OK", ""),
    ):
        said = world.quote("job", limits=TenantLimits(**bounds), **terms)  # type: ignore[arg-type]
        assert said.startswith(limit), (said, limit)
        gone(term)
        if limit.startswith("unknown"):
            world.redis("HSET", "pool:m", "lanes", "interactive")
        elif limit.startswith("lane_paused"):
            world.resume(LANES[0])
        elif limit.endswith("lane_memory"):
            world.redis("SET", "memory", "free")


def test_those_who_were_refused_return_one_after_another(world: World) -> None:
    """Each line's next promise comes after the jobs that were promised room, at half of the rate; a
    promise that is past does not count."""
    crowd(world)

    def refused(tenant: str = "t") -> float:
        said = world.submit("job", tenant, lane_bound_tokens=30)
        return float(said.removeprefix("lane_full lane_tokens "))

    # 9 tokens too many at 13/s; then 2 s for each job that was promised room before.
    assert [refused(), refused(), refused()] == [0.693, 2.693, 4.693]
    assert [refused("u"), refused("v"), refused("u")] == [2.693, 4.693, 6.693]
    assert world.quote("job", lane_bound_tokens=30).endswith("6.693")
    world.pass_time(6.693)
    assert [refused(), refused("u")] == [4.693, 6.0]
    world.submit("late", "t", lane="batch", deadline_s=0.5)
    assert world.redis("ZCARD", "promised:m") >= 2
    world.pass_time(3600)
    assert refused() == 0.693
    assert world.redis("ZCARD", "promised:m") == 1


def test_a_promise_ends_where_a_job_finds_room(world: World) -> None:
    """It does where nothing is ahead, and not for a limit per minute."""
    world.beat(rate=13.0, jobs=1, tokens=13)
    world.submit("a", lane_bound_tokens=13)
    world.submit("b", lane_bound_tokens=13)
    assert world.redis("ZRANGE", "promised:m", 0, -1) == ["interactive t"]
    world.submit("u", "u", deadline_s=700)
    assert world.redis("ZRANGE", "promised:m", 0, -1) == ["interactive t"]
    world.cancel("a")
    world.cancel("u", "u")
    assert world.submit("c") == "new"
    assert world.redis("ZRANGE", "promised:m", 0, -1) == []
    world.submit("d", **limits(requests_per_min=1))
    world.submit("e", **limits(requests_per_min=1))
    assert world.redis("ZRANGE", "promised:m", 0, -1) == []


def test_a_promise_is_at_most_an_hour(world: World) -> None:
    world.beat(rate=1.0, jobs=1, tokens=13)
    world.submit("a", cap=3000)
    said = [world.submit("b", cap=3000, lane_bound_tokens=3003) for _ in range(3)]
    assert [s.split()[2] for s in said] == ["3003.0", "3600.0", "3600.0"]


KEYS_OF_CALLS = {
    "the same id": (dict(), dict(), "known first"),
    "the same key": (
        {"idempotency_key": "k", "body_hash": "b"},
        {"idempotency_key": "k", "body_hash": "b"},
        "known first",
    ),
    "another body": (
        {"idempotency_key": "k", "body_hash": "b"},
        {"idempotency_key": "k", "body_hash": "c"},
        "idempotency_mismatch - None",
    ),
    "another key": (
        {"idempotency_key": "k", "body_hash": "b"},
        {"idempotency_key": "l", "body_hash": "b"},
        "new",
    ),
    "another tenant": (
        {"idempotency_key": "k", "body_hash": "b"},
        {"idempotency_key": "k", "body_hash": "b", "tenant": "u"},
        "new",
    ),
}


@pytest.mark.parametrize("name", KEYS_OF_CALLS)
def test_a_repeated_call_meets_its_job(world: World, name: str) -> None:
    """Also where the tenant's limits are reached; the meter is charged once."""
    first, second, expected = KEYS_OF_CALLS[name]
    one = limits(requests_per_min=1)
    world.submit("first", **first, **one)
    again = "first" if name == "the same id" else "again"
    assert world.submit(again, **second, **(one if expected != "new" else {})) == expected
    assert world.redis("HGET", "tenant:t", "requests") == "1"
    if "idempotency_key" in first:
        assert 0 < world.redis("TTL", "idem:t:k") <= 24 * 3600


def test_a_call_that_enters_is_counted_once(world: World) -> None:
    """`enter` counts it, `submit` gives it back where it is refused or a repetition."""
    two = TenantLimits(requests_per_min=2)
    counted: dict[str, Any] = {"limits": two, "is_counted": True}

    def entered() -> str:
        return str(world.told(world.functions.enter("t", two)))

    def level() -> float:
        return float(world.redis("HGET", "tenant:t", "requests"))

    assert (entered(), world.submit("a", **counted), level()) == ("None", "new", 1.0)
    assert (entered(), world.submit("a", **counted), level()) == ("None", "known a", 1.0)
    assert entered() == "None"
    assert world.submit("b", lane_bound_tokens=1, **counted) == "lane_full lane_tokens None"
    assert level() == 1.0
    assert (entered(), entered(), level()) == ("None", "JobRefused", 2.0)
    assert world.redis("TTL", "tenant:t") == -1
    world.pass_time(60)
    assert world.told(world.functions.enter("v", two)) is None
    assert world.redis("HGET", "tenant:v", "reserved") == "0"
    assert 0 < world.redis("TTL", "tenant:v") <= 24 * 3600
    assert world.told(world.functions.enter("x", TenantLimits())) is None
    assert world.redis("EXISTS", "tenant:x") == 0


def test_the_meter_of_tokens_has_what_was_used(world: World) -> None:
    """At the price of the lane: reserved first, then what was used; it leaks meanwhile."""
    terms = limits(tokens_per_min=60) | {"batch_price": 0.5}

    def level() -> float:
        return float(world.redis("HGET", "tenant:t", "tokens"))

    world.submit("a", lane="batch", **terms)
    assert level() == 6.5
    assert world.reply.rates.tokens.remaining == 53
    assert world.reply.rates.tokens.reset_s == 6.5
    world.submit("b", **terms)
    assert level() == 19.5
    world.claim()
    world.pass_time(1)
    assert world.append("a", 2, "succeeded") == "OK 3"
    assert level() == 19.5 - 1 - 6.5 + 2.5
    world.submit("c", lane="batch", **terms)
    assert level() == 14.5 + 6.5
    assert world.move("c", LANES[0]) == "OK"
    assert level() == 21 + 6.5
    assert world.move("c", "batch") == "OK"
    assert level() == 21
    assert world.cancel("c") == "cancelled"
    assert level() == 14.5
    world.pass_time(60)
    assert world.append("b", 1, "failed") == "OK 3"
    assert level() == 0
    world.submit("d", lane="batch", batch_price=0.5, **limits(requests_per_min=9))
    assert level() == 0, "without a limit of tokens nothing is metered"


LENGTHS = {
    "the cap": ([], {}, 13),
    "too few": ([2] * 4, {}, 13),
    "what was seen": ([2] * 5, {}, 5),
    "no more than the cap": ([9] * 5, {"cap": 4}, 7),
    "an expectation above": ([2] * 5, {"expects": 6}, 9),
    "an expectation below": ([4] * 5, {"expects": 1}, 7),
    "an expectation alone": ([], {"expects": 6}, 13),
    "choices": ([2] * 5, {"n": 3, "cap": 30}, 9),
    "of others": ([2] * 5, {"tenant": "u"}, 5),
    "of another lane": ([2] * 5, {"lane": "batch"}, 13),
    "longer ones": ([2] * 4 + [7], {}, 6),  # 2 + 0.2 · 5
    "shorter ones": ([7] * 4 + [2], {}, 10),  # 7 − 0.02 · 5
    "none": ([2] * 5, {"cap": 0}, 3),
    "of several choices": ([4] * 5, {"outputs_of": 2}, 5),
    "some that were cut": ([2] * 5 + [10], {}, 7),  # 2 + 0.2 · 8
    "some that failed": ([6] * 5 + [-1, -1, -1], {}, 9),
    "failures alone": ([-1] * 5, {}, 13),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_cost_is_learned_from_outputs(world: World, name: str) -> None:
    """Outputs of so many tokens; a negative one fails after as many."""
    outputs, terms, cost = LENGTHS[name]
    n = terms.get("outputs_of", 1)
    for i, num in enumerate(outputs):
        world.run_job(f"{i}", abs(num), "succeeded" if num > 0 else "failed", n=n)
    asked = {name: value for name, value in terms.items() if name != "outputs_of"}
    assert world.quote("job", **asked) == "OK"
    assert world.reply.cost_tokens == cost


def test_a_caller_that_steers_its_outputs_lowers_its_cost_slowly(world: World) -> None:
    """The first estimate is the cap, and it falls by a five hundredth."""
    for i in range(5):
        world.run_job(f"{i}", 1, grammar="root ::= 'a'")
    estimate = float(world.redis("GET", "lengths:m:interactive:t").split()[0])
    assert abs(estimate - (1 + 9 * 0.998**4)) < 1e-9
    assert world.redis("GET", "lengths:m:interactive:").split()[1] == "5"


def test_a_cost_grows_with_what_is_drawn(world: World) -> None:
    """By the excess and 32 tokens more, up to the cap: in the record, the lane, the reservation, the
    meter and the memory."""
    for i in range(5):
        world.run_job(f"{i}", 1)
    world.submit("job", cap=100, **limits(tokens_per_min=1000))
    world.claim()
    held = int(world.redis("HGET", "stored:lanes", LANES[0]))
    assert (world.field("job", "cost"), world.append("job", 1)) == ("4", "OK 2")
    assert (world.append("job", 1), world.field("job", "cost")) == ("OK 3", str(5 + 32))
    assert world.redis("HGET", "tenant:t", "reserved") == "37"
    assert world.redis("HGET", "counters:m:interactive", "running_tokens") == "37"
    assert float(world.redis("HGET", "tenant:t", "tokens")) == 37
    assert int(world.redis("HGET", "stored:lanes", LANES[0])) == held + 33 * 100
    assert (world.append("job", 31), world.append("job", 1)) == ("OK 4", "OK 5")
    assert world.field("job", "cost") == "37"
    assert (world.append("job", 60), world.field("job", "cost")) == ("OK 6", "103")
    assert world.append("job", 7) == "OVER 94"
    world.audit.check()


# Jobs before (tenant, lane, state, cost), and the place of a new job of `t` in `interactive` at 10 tokens/s.
Jobs = list[tuple[str, str, str, int]]
PLACES: dict[str, tuple[Jobs, dict[str, Any], tuple[int, int, float | None]]] = {
    "nobody": ([], {}, (0, 0, 0.0)),
    "nobody, one runs": ([("t", "interactive", "runs", 20)], {}, (0, 0, 2.0)),
    "own": ([("t", "interactive", "waits", 20)] * 2, {}, (2, 40, 4.0)),
    "another's twice as many": (
        [("u", "interactive", "waits", 20)] * 2 + [("t", "interactive", "waits", 20)],
        {},
        (2, 40, 4.0),
    ),
    "others alone": ([("u", "interactive", "waits", 20)] * 2, {}, (0, 0, 0.0)),
    "a lane above": ([("u", "interactive", "waits", 20)], {"lane": "batch"}, (1, 20, 2.0)),
    "a lane below": ([("u", "batch", "waits", 20)], {}, (0, 0, 0.0)),
    "running ones of both": (
        [("u", "batch", "runs", 20), ("u", "interactive", "runs", 40)],
        {},
        (0, 0, 4.0),
    ),
    "room beside what runs": (
        [("t", "interactive", "runs", 20)],
        {"jobs": 2, "tokens": 33},
        (0, 0, 0.0),
    ),
    "no room in tokens": (
        [("t", "interactive", "runs", 20)],
        {"jobs": 2, "tokens": 32},
        (0, 0, 2.0),
    ),
    "no room in jobs": ([("t", "interactive", "runs", 20)], {"jobs": 1, "tokens": 99}, (0, 0, 2.0)),
    "half computed": ([("t", "interactive", "half", 20)], {}, (0, 0, 1.0)),
    "of others of weight 3": (
        [("u3", "interactive", "waits", 20)] * 3 + [("t", "interactive", "waits", 20)],
        {},
        (4, 80, 8.0),
    ),
    "of weight 3": (
        [("u", "interactive", "waits", 20)] * 3 + [("t", "interactive", "waits", 20)],
        {"weight": 3.0},
        (1, 26, 2.6),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_work_ahead_tells_the_wait(world: World, name: str) -> None:
    """A job is told the same place when it is submitted and while it waits."""
    before, terms, place = PLACES[name]
    capacity = {"jobs": terms.get("jobs", 1), "tokens": terms.get("tokens", 20)}
    terms = {key: value for key, value in terms.items() if key not in capacity}
    world.beat(rate=10.0, **capacity)
    for i, (tenant, lane, state, cost) in enumerate(before):
        world.submit(f"{i}", tenant, lane, cap=cost - 3, weight=float(tenant[1:] or 1))
        if state != "waits":
            assert world.claim(lanes=[lane]) == [f"{i}"]
        if state == "half":
            world.append(f"{i}", cost // 2 - 3)
    assert (world.submit("job", **terms), world.place) == ("new", place)
    assert world.waits("job") == place
