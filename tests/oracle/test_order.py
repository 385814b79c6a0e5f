"""Which waiting job a worker gets next, and what it is charged for.

A job of these tests costs 10 tokens unless it says otherwise: a prompt of 3, and a cap of 7.
"""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from contract.function_types import FairRoom, LaneRoom
from tests.oracle.world import LANES, LEASE_S, World

BOTH = dict.fromkeys(LANES, 0.5)


def submit(world: World, *names: str, lane: str = LANES[0], cost: int = 10, **terms: Any) -> None:
    """The first letter of a name is its tenant."""
    for name in names:
        assert world.submit(name, name[0], lane, cap=cost - 3, **terms) == "new"


def one_by_one(world: World, num: int, **terms: Any) -> list[str]:
    """What a worker gets that has a place for one job at a time."""
    return [" ".join(world.claim(jobs=1, **terms)) for _ in range(num)]


def test_jobs_of_a_tenant_go_in_order_and_tenants_in_turns(world: World) -> None:
    submit(world, "t1", "t2", "t3", "u1", "u2")
    assert one_by_one(world, 6) == ["t1", "u1", "t2", "u2", "t3", ""]


def test_a_turn_is_by_tokens(world: World) -> None:
    """One job of 30 tokens against three of 10."""
    submit(world, "t1", "t2", cost=30)
    submit(world, "u1", "u2", "u3", "u4", "u5")
    assert one_by_one(world, 7) == ["t1", "u1", "u2", "u3", "t2", "u4", "u5"]


def test_a_turn_is_by_weight(world: World) -> None:
    """A tenant of weight 3 gets three times the tokens; the weight of its latest job counts."""
    submit(world, "t1", weight=9.0)
    submit(world, "t2", "t3", "t4", "t5", weight=3.0)
    submit(world, "u1", "u2")
    assert one_by_one(world, 7) == ["t1", "u1", "t2", "t3", "t4", "u2", "t5"]
    assert world.redis("HGET", "weights", "t") == "3"
    submit(world, "t6")
    assert world.redis("EXISTS", "weights") == 0


def test_a_tenant_that_comes_back_has_no_credit_and_its_debt(world: World) -> None:
    submit(world, "t1", "u1")
    assert one_by_one(world, 2) == ["t1", "u1"]
    submit(world, "u2", cost=40)
    submit(world, "u3", "v1", "v2")
    assert one_by_one(world, 2) == ["v1", "u2"]  # v begins at the clock, which is 10
    assert one_by_one(world, 1) == ["v2"]
    submit(world, "t2")
    assert one_by_one(world, 2) == ["t2", "u3"]
    submit(world, "u4", "w1", "w2", "w3", "w4", "w5", "w6")
    assert one_by_one(world, 3) == ["w1", "u4", "w2"], "u has paid for u3 alone"


def test_unused_tokens_are_given_back(world: World) -> None:
    """Of 100 tokens 4 were used: the tenant goes on before another that used its 10."""
    submit(world, "t1", cost=100)
    submit(world, "u1", "t2", "u2")
    assert one_by_one(world, 2) == ["t1", "u1"]
    world.append("t1", 1, "succeeded")
    assert one_by_one(world, 1) == ["t2"]
    submit(world, "t3", cost=100, weight=2.0)
    assert one_by_one(world, 2) == ["u2", "t3"]
    world.append("t3", 1, "succeeded")
    submit(world, "u3", "t4", "t5", weight=2.0)
    assert one_by_one(world, 3) == ["t4", "u3", "t5"]


def test_returned_jobs_go_first_in_their_lane(world: World) -> None:
    submit(world, "t1", "t2", "u1")
    submit(world, "t3", lane="batch")
    assert one_by_one(world, 2) == ["t1", "u1"]
    assert [world.release("u1"), world.release("t1")] == ["OK", "OK"]
    assert one_by_one(world, 5) == ["u1", "t1", "t2", "t3", ""]


def test_lanes_go_in_the_order_of_the_claim(world: World) -> None:
    submit(world, "t1")
    submit(world, "t2", lane="batch")
    assert world.claim(lanes=("batch",)) == ["t2"]
    submit(world, "t3", lane="batch")
    assert world.claim(lanes=("batch", "interactive")) == ["t3", "t1"]


def test_a_lane_gets_its_minimum_share(world: World) -> None:
    """It is owed three tenths of what others get, up to its next job; an empty lane is owed nothing."""
    shares = {"min_shares": {"batch": 0.3}}
    submit(world, *(f"t{i}" for i in range(6)))
    assert one_by_one(world, 2, **shares) == ["t0", "t1"]
    assert world.redis("HGET", "owed:m", "batch") is None
    submit(world, "b0", "b1", lane="batch")
    assert one_by_one(world, 4, **shares) == ["t2", "t3", "t4", "t5"]
    assert float(world.redis("HGET", "owed:m", "batch")) == 12
    submit(world, "t6", "t7")
    assert one_by_one(world, 2, **shares) == ["b0", "t6"]
    assert float(world.redis("HGET", "owed:m", "batch")) == 12 - 10 + 3 + 3
    assert one_by_one(world, 2, **shares) == ["t7", "b1"]
    assert float(world.redis("HGET", "owed:m", "batch")) == 0


def test_a_deficit_does_not_pass_a_job_that_waits_for_room(world: World) -> None:
    """Jobs for a deficit fit into it as a whole; those that it passes over count only then."""
    world.redis("HSET", "owed:m", "batch", 15)
    submit(world, "b1", lane="batch", cost=40)
    submit(world, "b2", lane="batch")
    submit(world, "t1")
    shares = {"min_shares": {"batch": 0.3}}
    assert world.claim(jobs=1, tokens=20, **shares) == ["b2"]
    assert world.field("b1", "passed") == "1"
    world.redis("HSET", "owed:m", "batch", 15)
    assert world.claim(jobs=1, tokens=100, **shares) == ["t1"], "b1 costs more than it is owed"


def test_a_deficit_is_bounded(world: World) -> None:
    world.redis("HSET", "owed:m", "batch", 2**20 - 1)
    submit(world, "b1", lane="batch", cost=40)
    submit(world, "t1")
    assert world.claim(tokens=20, min_shares=BOTH) == ["t1"]
    assert float(world.redis("HGET", "owed:m", "batch")) == 2**20


def test_a_job_that_does_not_fit_is_passed_eight_times(world: World) -> None:
    """Each claim of a job behind it counts, and then nothing of its lane goes before it."""
    submit(world, "t0", cost=100)
    submit(world, *(f"t{i}" for i in range(1, 12)))
    submit(world, "u1", lane="batch")
    assert world.claim(tokens=50) == [f"t{i}" for i in range(1, 6)]
    assert world.claim(tokens=50, jobs=3) == [f"t{i}" for i in range(6, 9)]
    assert world.field("t0", "passed") == "8"
    assert world.claim(tokens=50) == []
    assert world.claim(tokens=50, lanes=("batch",)) == ["u1"]
    assert world.claim(tokens=120, jobs=2) == ["t0", "t9"]


def test_four_jobs_are_passed_and_no_fifth(world: World) -> None:
    submit(world, *(f"t{i}" for i in range(3)), cost=100)
    submit(world, "t3")
    assert world.claim(tokens=50) == ["t3"]
    submit(world, "t4", cost=100)
    submit(world, "t5")
    assert world.claim(tokens=50) == [], "the fourth that does not fit ends the search"
    submit(world, "u1")
    assert world.claim(tokens=50) == ["u1"], "of its tenant"


def test_no_more_than_the_room_is_filled(world: World) -> None:
    """Tokens and slots; each choice fills a slot, and one choice must fit."""
    submit(world, "t1", "t2", "t3")
    assert (world.claim(tokens=9), world.claim(tokens=10)) == ([], ["t1"])
    assert (world.claim(jobs=0), world.claim(jobs=1)) == ([], ["t2"])
    world.cancel("t3")
    submit(world, "t4", cost=33, n=3)
    submit(world, "t5", "t6")
    assert world.claim(tokens=10) == ["t5"]
    assert world.claim(tokens=11, jobs=1) == ["t4"]
    submit(world, "t7", cost=33, n=3)
    assert world.claim(tokens=100, jobs=2) == ["t6", "t7"]
    submit(world, "t8", cost=33, n=3)
    submit(world, "t9")
    assert world.claim(tokens=100, jobs=3) == ["t8"], "it fills three slots"


def rooms(**each: tuple[int, ...]) -> dict[str, LaneRoom]:
    return {lane: LaneRoom(*room) for lane, room in each.items()}


ROOMS: dict[str, tuple[Mapping[str, LaneRoom], list[str]]] = {
    "none for a lane": (rooms(batch=(9, 99)), ["b0", "b1", "b2"]),
    "few slots for the first lane": (
        rooms(interactive=(1, 99), batch=(9, 99)),
        ["t0", "b0", "b1", "b2"],
    ),
    "slots are of all": (rooms(interactive=(2, 99), batch=(3, 99)), ["t0", "t1", "b0"]),
    "few tokens for the first lane": (
        rooms(interactive=(9, 10), batch=(9, 99)),
        ["t0", "b0", "b1", "b2"],
    ),
    "tokens are of all": (rooms(interactive=(2, 20), batch=(9, 30)), ["t0", "t1", "b0"]),
    "slots for the other alone": (rooms(interactive=(0, 99), batch=(1, 99)), ["b0"]),
}


@pytest.mark.parametrize("name", ROOMS)
def test_each_lane_has_a_room_of_its_own(world: World, name: str) -> None:
    room, expected = ROOMS[name]
    submit(world, "t0", "t1", "t2")
    submit(world, "b0", "b1", "b2", lane="batch")
    assert world.claim(rooms=room) == expected


def test_few_slots_go_to_a_deficit(world: World) -> None:
    """The lane is owed 30 tokens, and one slot may go first for that."""
    submit(world, "t0", "t1")
    submit(world, "b0", "b1", lane="batch", n=2)
    world.redis("HSET", "owed:m", "batch", 30)
    room = {"interactive": LaneRoom(3, 99), "batch": LaneRoom(9, 99, 1)}
    assert world.claim(rooms=room, min_shares={"batch": 0.3}) == ["b0", "t0", "b1"]
    world.redis("HSET", "owed:m", "batch", 30)
    submit(world, "b2", lane="batch")
    room = {"interactive": LaneRoom(0, 99), "batch": LaneRoom(0, 99, 9)}
    assert world.claim(rooms=room, min_shares={"batch": 0.3}) == []


FULL = {"x": (4, 400)}
# Held slots and tokens of tenants, slots and tokens of the worker → claimed jobs of t, u, x.
FAIR: dict[str, tuple[dict[str, tuple[int, int]], tuple[int, int], list[str]]] = {
    "half of the slots, then a third": (FULL, (4, 400), ["t0", "u0"]),
    "a third, then a fourth": (FULL | {"y": (1, 10)}, (6, 400), ["t0", "u0"]),
    "less than one": (FULL | {"y": (1, 10), "z": (1, 1)}, (3, 400), []),
    "some are held": (FULL | {"t": (1, 10)}, (4, 400), ["t0", "u0"]),
    "half of the tokens": (FULL, (4, 20), ["t0"]),
    "fewer tokens": (FULL, (4, 19), []),
    "two tenants": (FULL, (6, 600), ["t0", "t1", "u0"]),
}


@pytest.mark.parametrize("name", FAIR)
def test_a_full_worker_takes_what_is_below_its_share(world: World, name: str) -> None:
    held, (slots, tokens), expected = FAIR[name]
    submit(world, "x0", "t0", "t1", "t2", "u0", "u1", lane="batch")
    room = {"batch": LaneRoom(0, 0, fair=FairRoom(slots, tokens, held))}
    claimed = world.claim(rooms=room)
    assert sorted(claimed) == sorted(expected)


def test_shares_of_slots_are_by_weight(world: World) -> None:
    submit(world, "t0", "t1", "t2", "t3", lane="batch", weight=3.0)
    room = {"batch": LaneRoom(0, 0, fair=FairRoom(4, 400, FULL))}
    assert world.claim(rooms=room) == ["t0", "t1", "t2"]


def test_a_returned_job_takes_what_is_below_its_share(world: World) -> None:
    """What it passes over counts."""
    submit(world, "t0", lane="batch", cost=300)
    submit(world, "x0", "t1", lane="batch")
    world.claim()
    for name in ("x0", "t0", "t1"):
        world.release(name)
    room = {"batch": LaneRoom(0, 0, fair=FairRoom(4, 400, FULL))}
    assert world.claim(rooms=room) == ["t1"]
    assert [world.field(name, "passed") for name in ("x0", "t0")] == [None, "1"]
    submit(world, "u0", lane="batch", cost=300)
    submit(world, "u1", lane="batch")
    assert world.claim(rooms=room, jobs=1) == ["u1"]
    assert world.field("u0", "passed") == "1"
    room = {"batch": LaneRoom(1, 999, fair=FairRoom(4, 400, FULL))}
    assert world.claim(rooms=room) == ["x0"], "with a slot there are no shares"


PAUSES: dict[str, tuple[tuple[str, str], list[str]]] = {
    "a tenant": (("", "t"), ["u0", "b0"]),
    "a lane": ((LANES[0], ""), ["b0"]),
    "a tenant in a lane": ((LANES[0], "u"), ["t0", "t1", "b0"]),
    "the other lane": (("batch", ""), ["t0", "u0", "t1"]),
    "of neither": (("batch", "t"), ["t0", "u0", "t1", "b0"]),
}


@pytest.mark.parametrize("name", PAUSES)
def test_what_is_paused_waits(world: World, name: str) -> None:
    """It is claimed in order once it is resumed; running jobs go on."""
    line, expected = PAUSES[name]
    submit(world, "t0", "t1", "u0")
    submit(world, "b0", lane="batch")
    world.pause(*line)
    assert world.claim() == expected
    assert world.resume(*line)
    assert not world.resume(*line)
    rest = {"t0", "t1", "u0", "b0"} - set(expected)
    assert set(world.claim()) == rest
    assert world.append("u0") == "OK 2"


def test_a_returned_job_of_a_paused_tenant_waits(world: World) -> None:
    submit(world, "t0", "u0", "t1")
    world.claim()
    for name in ("t0", "u0", "t1"):
        world.release(name)
    world.pause("", "t")
    assert world.claim() == ["u0"]
    world.resume("", "t")
    assert world.claim() == ["t0", "t1"]


def test_a_paused_tenant_saves_no_credit(world: World) -> None:
    submit(world, *(f"t{i}" for i in range(6)), *(f"u{i}" for i in range(8)))
    world.pause("", "t")
    assert one_by_one(world, 6) == [f"u{i}" for i in range(6)]
    world.resume("", "t")
    assert one_by_one(world, 4) == ["t0", "t1", "t2", "u6"]


def test_others_do_not_wait_for_what_is_paused(world: World) -> None:
    """A paused lane and a paused tenant above are not ahead, nor do they weigh."""
    world.beat(rate=10.0, jobs=1, tokens=10)
    submit(world, "t0", "t1", "u0")
    for pause, place in (
        (None, (3, 30, 3.0)),
        (("", "t"), (1, 10, 1.0)),
        ((LANES[0], "u"), (2, 20, 2.0)),
        ((LANES[0], ""), (0, 0, 0.0)),
    ):
        if pause:
            world.pause(*pause)
        world.submit("b", "b", "batch")
        assert world.place == place
        world.cancel("b", "b")
        world.delete("b", "b")
        if pause:
            world.resume(*pause)
    world.pause("", "t")
    submit(world, "u1")
    assert world.place == (1, 10, 1.0)


def test_a_suspect_runs_alone(world: World) -> None:
    """An idle worker with the turn gets it, and that worker nothing else before; one worker in four
    runs a suspect."""
    for worker in ("w", "x", "y", "z"):
        world.beat(worker)
    submit(world, "t1", "t2")
    world.claim()
    assert [world.blame("t1"), world.blame("t2")] == ["OK", "OK"]
    submit(world, "t3", "t4", "t5")
    assert world.claim("w", jobs=1) == [], "it has the turn"
    assert world.claim("x", jobs=1) == ["t3"]
    world.pass_time(LEASE_S - 1)
    assert (world.claim("w", jobs=1), world.claim("x", jobs=1)) == ([], ["t4"])
    world.pass_time(LEASE_S)
    assert world.claim("x", is_idle=True) == ["t1 alone"]
    assert world.redis("EXISTS", "turn:m") == 0
    assert world.claim("y", is_idle=True) == ["t5"], "another suspect runs"
    assert world.append("t1", 1, "succeeded", worker="x") == "OK 3"
    assert world.claim("y", is_idle=True) == ["t2 alone"]
    assert world.mine("y") == []
    world.audit.check()


def test_of_eight_workers_two_run_suspects(world: World) -> None:
    for i in range(8):
        world.beat(f"w{i}")
    submit(world, "t1", "t2", "t3")
    world.claim("w0")
    assert [world.blame(f"t{i}", worker="w0") for i in (1, 2, 3)] == ["OK"] * 3
    assert [world.claim(f"w{i}", is_idle=True) for i in range(3)] == [
        ["t1 alone"],
        ["t2 alone"],
        [],
    ]


def test_a_suspect_whose_time_is_over_ends(world: World) -> None:
    submit(world, "t1", deadline_s=5)
    submit(world, "t2")
    world.claim()
    world.blame("t1")
    world.blame("t2")
    world.pass_time(5)
    assert world.claim(is_idle=True) == ["t2 alone"]
    assert world.status("t1") == "expired"


def test_a_paused_suspect_waits(world: World) -> None:
    submit(world, "t1", "u1")
    world.claim()
    world.blame("t1")
    world.pause("", "t")
    submit(world, "u2")
    assert world.claim(is_idle=True) == ["u2"]
    world.resume("", "t")
    assert world.claim(is_idle=True) == ["t1 alone"]


def test_the_first_claim_is_counted_and_its_wait_compared(world: World) -> None:
    """Claims count by lane; the wait of the first alone is observed, and held against the prediction."""
    world.beat(rate=10.0, jobs=1, tokens=1)
    submit(world, "t1", "t2")
    world.pass_time(3)
    world.claim()
    world.release("t1")
    world.pass_time(2)
    world.claim()
    totals = world.run(world.functions.snapshot("m", LANES)).totals
    assert totals["attempts_total:interactive"] == 3
    assert totals["request_queue_time_seconds:interactive:sum"] == 2 * 3_000_000
    assert world.redis("LRANGE", "calibration:m:interactive", 0, -1) == ["1000 3000", "0 3000"]
    assert world.field("t1", "claimed", "attempt", "epoch") == [str(world.now_ms - 2000), "1", "2"]
    assert world.field("t1", "runs").splitlines() == [
        f"{world.now_ms - 2000} 1 w",
        f"{world.now_ms} 1 w",
    ]


def test_a_moved_job_has_no_prediction_and_goes_behind(world: World) -> None:
    """It gets a place in its new lane; its charge comes with it where it runs."""
    submit(world, "t1", "u1")
    submit(world, "t2", cost=30)
    submit(world, "t3", lane="batch")
    assert world.move("t1", "batch") == "OK"
    assert world.waits("t1") == (1, 10, None)
    assert world.claim() == ["t2", "u1", "t3", "t1"]
    assert world.redis("EXISTS", "calibration:m:batch") == 1
    assert len(world.redis("LRANGE", "calibration:m:batch", 0, -1)) == 1
    assert world.move("t2", "batch") == "OK"
    submit(world, "u2", "t4")
    submit(world, "u3", "t5", lane="batch")
    assert world.claim() == ["t4", "u2", "u3", "t5"], "t has paid in batch for three"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 4.0), (0.5, 3.0)])
@pytest.mark.parametrize("seed", range(3))
def test_service_is_by_weight(world: World, seed: int, weights: tuple[float, float]) -> None:
    """Two tenants always have waiting jobs of any cost. Their service, divided by weight, never
    differs by more than twice the largest cost."""
    rng, had = random.Random(seed), Counter[str]()
    costs = [rng.randint(4, 40) for _ in range(60)]
    for i, cost in enumerate(costs):
        submit(world, f"{'tu'[i % 2]}{i}", cost=cost, weight=weights[i % 2])
    while True:
        world.claim(rng.choice("wxy"), jobs=rng.randint(1, 4))
        for item in world.reply:
            had[item.job.tenant] += item.cost_tokens
        if any(world.redis("EXISTS", f"q:m:{LANES[0]}:{tenant}") == 0 for tenant in "tu"):
            break
        if all(world.redis("ZSCORE", f"active:m:{LANES[0]}", tenant) for tenant in "tu"):
            apart = had["t"] / weights[0] - had["u"] / weights[1]
            assert abs(apart) <= 2 * max(costs) / min(weights)
        else:
            break


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_lane_waits_no_longer_than_its_share_allows(world: World, share: float) -> None:
    """While an urgent lane has waiting jobs, the next job of `batch` waits for at most cost / share
    tokens of the other and one job's."""
    rng, passed = random.Random(0), 0
    costs = [rng.randint(4, 40) for _ in range(60)]
    for i, cost in enumerate(costs):
        submit(world, f"t{i}", cost=cost)
        submit(world, f"b{i}", lane="batch", cost=cost)
    heads = iter(costs)
    head = next(heads)
    while world.redis("EXISTS", f"active:m:{LANES[0]}"):
        world.claim(jobs=rng.randint(1, 5), min_shares={"batch": share})
        for item in world.reply:
            passed = 0 if item.job.lane == "batch" else passed + item.cost_tokens
            head = next(heads) if item.job.lane == "batch" else head
            assert passed <= head / share + max(costs)


# An offer, what happens to it, and what another worker gets.
OFFERS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "it is taken": (None, {}, ["t1"]),
    "the offering worker has room": (None, {"worker": "w"}, []),
    "a worker without a slot": (None, {"jobs": 0}, []),
    "a worker with little room": (None, {"tokens": 9}, []),
    "a worker with room": (None, {"tokens": 10}, ["t1"]),
    "a lane with little room": (None, {"rooms": rooms(interactive=(1, 9))}, []),
    "a worker with less room than its lane": (
        None,
        {"tokens": 9, "rooms": rooms(interactive=(1, 99))},
        [],
    ),
    "a lane with room": (None, {"rooms": rooms(interactive=(1, 10))}, ["t1"]),
    "another lane": (None, {"lanes": ("batch",)}, []),
    "it has gone on": (lambda w: w.append("t1"), {}, []),
    "it has ended": (lambda w: w.append("t1", 1, "succeeded"), {}, []),
    "it was given back": (lambda w: w.release("t1"), {"only_offers": True}, []),
    "it is given back and claimed": (lambda w: w.release("t1"), {}, ["t1"]),
    "it was moved": (lambda w: w.move("t1", "batch"), {}, []),
    "it has waited long": (lambda w: w.pass_time(2.5), {}, ["t1"]),
    "it is no longer offered": (lambda w: w.pass_time(2.501), {}, []),
    "a waiting job comes first": (lambda w: submit(w, "u1"), {"jobs": 1}, ["u1"]),
    "a waiting job is left out": (lambda w: submit(w, "u1"), {"only_offers": True}, ["t1"]),
    "a job that waits for room": (
        lambda w: (submit(w, "u1", cost=50), w.redis("HSET", "job:job-0-u1", "passed", 8)),
        {"tokens": 20},
        [],
    ),
    "a job of an A/B": (lambda w: w.redis("HSET", "job:job-0-t1", "arm", "control x"), {}, []),
}


@pytest.mark.parametrize("name", OFFERS)
def test_what_waits_in_an_engine_is_offered_to_others(world: World, name: str) -> None:
    event, terms, expected = OFFERS[name]
    submit(world, "t1")
    world.claim()
    assert world.release("t1", "offer") == "OK"
    if event:
        event(world)
    assert world.claim(**({"worker": "x"} | terms)) == expected
    if expected == ["t1"]:
        number = int(world.field("t1", "epoch"))
        assert (number, world.field("t1", "attempt")) == (2, "1")
        assert world.append("t1") == "FENCED 0"
        assert world.append("t1", worker="x") == "OK 2"
    world.audit.check()


def test_several_offers_are_taken_as_there_is_room(world: World) -> None:
    submit(world, "t1", "t2", "t3", n=2)
    world.claim()
    for name in ("t1", "t2", "t3"):
        world.release(name, "offer")
    assert world.claim("x", jobs=3) == ["t1", "t2"]
    assert world.claim("x", jobs=3, tokens=4) == []
    assert world.claim("x", jobs=3, tokens=5) == ["t3"]
