"""Which waiting job a worker gets next. A job costs 10 tokens, unless a script says otherwise."""

import random
from collections import Counter

import pytest

from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import LANES, World


@scripts("""
jobs of a tenant go in order and tenants in turns
  submit t1 t2 t3 u1 u2
  turns 6 -> t1 u1 t2 u2 t3 -
a turn is by tokens
  submit t1 t2 cost=30; submit u1 u2 u3 u4 u5
  turns 7 -> t1 u1 u2 u3 t2 u4 u5
a turn is by weight, that of the latest job
  submit t1 weight=9; submit t2 t3 t4 t5 weight=3; submit u1 u2
  turns 7 -> t1 u1 t2 t3 t4 u2 t5
  redis HGET weights t -> 3
  submit t6; redis EXISTS weights -> 0
a tenant that comes back has no credit, and its debt
  submit t1 u1; turns 2 -> t1 u1
  submit u2 cost=40; submit u3 v1 v2
  turns 3 -> v1 u2 v2
  submit t2; turns 2 -> t2 u3
  submit u4 w1 w2 w3; turns 3 -> w1 u4 w2
unused tokens are given back, by weight
  submit t1 cost=100; submit u1 t2 u2
  turns 2 -> t1 u1
  append t1 1 succeeded; turns 1 -> t2
  submit t3 cost=100 weight=2; turns 2 -> u2 t3
  append t3 1 succeeded; submit u3 t4 t5 weight=2
  turns 3 -> t4 u3 t5
returned jobs go first in their lane
  submit t1 t2 u1; submit t3 lane=batch
  turns 2; release u1; release t1; turns 5 -> u1 t1 t2 t3 -
lanes go in the order of the claim
  submit t1; submit t2 t3 lane=batch
  claim lanes=batch jobs=1 -> t2
  claim lanes=batch,interactive -> t3 t1
a lane gets its minimum share, where jobs wait in it
  submit t0 t1 t2 t3 t4 t5 t6 t7
  turns 2 shares=batch:0.3; redis HGET owed:m batch -> None
  submit b0 b1 lane=batch
  turns 4 shares=batch:0.3 -> t2 t3 t4 t5
  number HGET owed:m batch -> 12.0
  turns 2 shares=batch:0.3 -> b0 t6
  number HGET owed:m batch -> 8.0
  turns 2 shares=batch:0.3 -> t7 b1
  number HGET owed:m batch -> 0.0
a deficit covers a job as a whole, and passes what does not fit
  redis HSET owed:m batch 15; submit b1 lane=batch cost=40; submit b2 lane=batch; submit t1
  claim jobs=1 tokens=20 shares=batch:0.3 -> b2
  field b1 passed -> 1
  redis HSET owed:m batch 15; claim jobs=1 tokens=100 shares=batch:0.3 -> t1
a deficit is bounded
  redis HSET owed:m batch 1048575; submit b1 lane=batch cost=40; submit t1
  claim tokens=20 shares=batch:0.5 -> t1
  number HGET owed:m batch -> 1048576.0
few slots go to a deficit
  submit t0 t1; submit b0 b1 lane=batch n=2; redis HSET owed:m batch 30
  claim rooms=interactive:3:99,batch:9:99:1 shares=batch:0.3 -> b0 t0 b1
  redis HSET owed:m batch 30; submit b2 lane=batch
  claim rooms=interactive:0:99,batch:0:99:9 shares=batch:0.3 -> -
a job that does not fit is passed eight times, and holds up its lane alone
  submit t0 cost=100; submit t1 t2 t3 t4 t5 t6 t7 t8 t9; submit u1 lane=batch
  claim tokens=50 -> t1 t2 t3 t4 t5
  claim tokens=50 jobs=3 -> t6 t7 t8
  field t0 passed -> 8
  claim tokens=50 -> -
  claim tokens=50 lanes=batch -> u1
  claim tokens=120 jobs=2 -> t0 t9
three jobs of a tenant are passed, and no fourth
  submit t0 t1 t2 cost=100; submit t3; claim tokens=50 -> t3
  submit t4 cost=100; submit t5; claim tokens=50 -> -
  submit u1; claim tokens=50 -> u1
tokens and slots bound a claim
  submit t1 t2 t3; claim tokens=9 -> -
  claim tokens=10 -> t1
  claim jobs=0 -> -
  claim jobs=1 -> t2
each choice fills a slot, and one must fit
  submit t4 cost=33 n=3; submit t5 t6; claim tokens=10 -> t5
  claim tokens=11 jobs=1 -> t4
  submit t7 cost=33 n=3; claim tokens=100 jobs=2 -> t6 t7
  submit t8 cost=33 n=3; submit t9; claim tokens=100 jobs=3 -> t8
""")
def test_a_worker_gets_the_next_job(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
none for a lane: claim rooms=batch:9:99 -> b0 b1 b2
few slots for the first lane: claim rooms=interactive:1:99,batch:9:99 -> t0 b0 b1 b2
slots are of all: claim rooms=interactive:2:99,batch:3:99 -> t0 t1 b0
few tokens for the first lane: claim rooms=interactive:9:10,batch:9:99 -> t0 b0 b1 b2
tokens are of all: claim rooms=interactive:2:20,batch:9:30 -> t0 t1 b0
slots for the other alone: claim rooms=interactive:0:99,batch:1:99 -> b0
""")
def test_each_lane_has_a_room_of_its_own(calls: Calls, script: list[str]) -> None:
    calls.run(["submit t0 t1 t2; submit b0 b1 b2 lane=batch", *script])


@scripts("""
half of the slots, then a third: claim fair=batch:4:400,x:4:400 -> t0 u0
a third, then a fourth: claim fair=batch:6:400,x:4:400,y:1:10 -> t0 u0
less than one: claim fair=batch:3:400,x:4:400,y:1:10,z:1:1 -> -
some are held: claim fair=batch:4:400,x:4:400,t:1:10 -> t0 u0
half of the tokens: claim fair=batch:4:20,x:4:400 -> t0
fewer tokens: claim fair=batch:4:19,x:4:400 -> -
three in one call: claim fair=batch:6:600,x:4:400 -> t0 u0 t1
by weight: submit t9 lane=batch weight=3; claim fair=batch:4:400,x:4:400 -> t0 t1 t2
""")
def test_a_full_worker_takes_what_is_below_its_share(calls: Calls, script: list[str]) -> None:
    """Slots and tokens of the lane at the worker, then what tenants hold of them."""
    few = "submit x0 t0 t1 t2 lane=batch" if "weight" in script[0] else ""
    calls.run([few or "submit x0 t0 t1 t2 u0 u1 lane=batch", *script])


@scripts("""
a returned job takes what is below its share, and what it passes counts
  submit t0 lane=batch cost=300; submit x0 t1 lane=batch
  claim; release x0; release t0; release t1
  claim fair=batch:4:400,x:4:400 -> t1
  field x0 passed -> None
  field t0 passed -> 1
  submit u0 lane=batch cost=300; submit u1 lane=batch
  claim fair=batch:4:400,x:4:400 jobs=1 -> u1
  field u0 passed -> 1
a returned job of a paused tenant waits
  submit t0 u0 t1; claim; release t0; release u0; release t1; pause '' t; claim -> u0
  resume '' t; claim -> t0 t1
a paused tenant saves no credit
  submit t0 t1 t2 t3 t4 u0 u1 u2 u3 u4 u5 u6 u7; pause '' t
  turns 6 -> u0 u1 u2 u3 u4 u5
  resume '' t; turns 4 -> t0 t1 t2 u6
others do not wait for what is paused
  beat rate=10 jobs=1 tokens=10; submit t0 t1 u0
  submit b0 lane=batch; ahead -> 3 30 3.0
  pause '' t; submit c0 lane=batch; ahead -> 1 10 1.0
  resume '' t; pause interactive u; submit d0 lane=batch; ahead -> 2 20 2.0
  resume interactive u; pause interactive; submit e0 lane=batch; ahead -> 0 0 0.0
  resume interactive; pause '' t; submit u1; ahead -> 1 10 1.0
a moved job has no prediction, goes behind, and has its charge with it
  submit t1 u1; submit t2 cost=30; submit t3 lane=batch
  move t1 batch; waits t1 -> 1 10 None
  claim -> t2 u1 t3 t1
  redis LLEN calibration:m:batch -> 1
  move t2 batch; submit u2 t4; submit u3 t5 lane=batch
  claim -> t4 u2 u3 t5
the first claim is counted, and its wait compared
  beat rate=10 jobs=1 tokens=1; submit t1 t2; pass_time 3; claim; release t1; pass_time 2; claim
  redis HGET totals:m attempts_total:interactive -> 3
  redis HGET totals:m request_queue_time_seconds:interactive:sum -> 6000000
  redis LRANGE calibration:m:interactive 0 -1 -> 1000 3000 0 3000
  field t1 attempt epoch -> 1 2
  since t1 claimed -> 2.0
""")
def test_what_was_returned_moved_or_paused(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
a tenant: pause '' t; claim -> u0 b0
a lane: pause interactive; claim -> b0
a tenant in a lane: pause interactive u; claim -> t0 t1 b0
the other lane: pause batch; claim -> t0 u0 t1
of neither: pause batch t; claim -> t0 u0 t1 b0
it is resumed: pause '' t; resume '' t; claim -> t0 u0 t1 b0
resumed for another: pause '' t; resume '' u; claim -> u0 b0
there is none: resume '' t -> False
there is one: pause '' t; resume '' t -> True
""")
def test_what_is_paused_waits(calls: Calls, script: list[str]) -> None:
    calls.run(["submit t0 t1 u0; submit b0 lane=batch", *script])


@scripts("""
an idle worker with the turn gets one, and before that nothing
  submit t1 t2; claim; blame t1; blame t2; submit t3 t4 t5
  claim w jobs=1 -> -
  claim x jobs=1 -> t3
  pass_time 9; claim w jobs=1 -> -
  claim x jobs=1 -> t4
  pass_time 10; claim x is_idle=True -> t1!
  redis EXISTS turn:m -> 0
  claim y is_idle=True -> t5
  append t1 1 succeeded worker=x; claim y is_idle=True -> t2!
of eight workers two run suspects
  beat a; beat b; beat c; beat d; submit t1 t2 t3; claim; blame t1; blame t2; blame t3
  claim w is_idle=True -> t1!
  claim x is_idle=True -> t2!
  claim y is_idle=True -> -
one whose time is over ends
  submit t1 deadline_s=5; submit t2; claim; blame t1; blame t2; pass_time 5
  claim is_idle=True -> t2!
  status t1 -> expired
one that is paused waits
  submit t1 u1; claim; blame t1; pause '' t; submit u2; claim is_idle=True -> u2
  resume '' t; claim is_idle=True -> t1!
""")
def test_a_suspect_runs_alone(calls: Calls, script: list[str]) -> None:
    """One of four workers runs one."""
    calls.run(["beat w; beat x; beat y; beat z", *script])


@scripts("""
it is taken: claim x -> t1
the offering worker has room: claim w -> -
a worker without a slot: claim x jobs=0 -> -
a worker with little room: claim x tokens=9 -> -
a worker with room: claim x tokens=10 -> t1
a lane with little room: claim x rooms=interactive:1:9 -> -
a worker with less room than its lane: claim x tokens=9 rooms=interactive:1:99 -> -
a lane with room: claim x rooms=interactive:1:10 -> t1
another lane: claim x lanes=batch -> -
it has gone on: append t1; claim x -> -
it has ended: append t1 1 succeeded; claim x -> -
it is given back and claimed: release t1; claim x -> t1
one that was given back waits behind others
  start u1 u2 u3 u4 cost=50; release u1; release u2; release u3; release u4
  release t1; claim x tokens=20 -> -
it was moved: move t1 batch; claim x -> -
it has waited long: pass_time 2.5; claim x -> t1
it is no longer offered: pass_time 2.501; claim x -> -
a waiting job comes first: submit u1; claim x jobs=1 -> u1
a job that waits for room
  submit u1 cost=50; redis HSET job:job-0-u1 passed 8; claim x tokens=20 -> -
a job of an A/B: redis HSET job:job-0-t1 arm 'control x'; claim x -> -
it is another's then
  claim x; field t1 epoch attempt -> 2 1
  append t1 -> FENCED 0
  append t1 worker=x -> OK 2
several are taken as there is room
  start t2 t3 n=2; release t2 offer; release t3 offer
  claim x jobs=2 -> t1 t2
  claim x jobs=3 tokens=4 -> -
  claim x jobs=3 tokens=5 -> t3
""")
def test_what_waits_in_an_engine_is_offered_to_others(calls: Calls, script: list[str]) -> None:
    calls.run(["start t1; release t1 offer -> OK", *script])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 4.0), (0.5, 3.0)])
def test_service_is_by_weight(world: World, weights: tuple[float, float]) -> None:
    """Two tenants always have waiting jobs of any cost. Their service, divided by weight, never
    differs by more than twice the largest cost."""
    rng, had = random.Random(0), Counter[str]()
    costs = [rng.randint(4, 40) for _ in range(60)]
    for i, cost in enumerate(costs):
        world.submit(f"{'tu'[i % 2]}{i}", cost=cost, weight=weights[i % 2])
    while True:
        world.claim(rng.choice("wxy"), jobs=rng.randint(1, 4))
        for item in world.reply:
            had[item.job.tenant] += item.cost_tokens
        if not all(world.redis("ZSCORE", f"active:m:{LANES[0]}", tenant) for tenant in "tu"):
            return
        apart = had["t"] / weights[0] - had["u"] / weights[1]
        assert abs(apart) <= 2 * max(costs) / min(weights)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_lane_waits_no_longer_than_its_share_allows(world: World, share: float) -> None:
    """While an urgent lane has waiting jobs, the next job of `batch` waits for at most cost / share
    tokens of the other and one job's."""
    rng, passed = random.Random(0), 0
    costs = [rng.randint(4, 40) for _ in range(60)]
    for i, cost in enumerate(costs):
        world.submit(f"t{i}", cost=cost)
        world.submit(f"b{i}", lane="batch", cost=cost)
    heads = iter(costs)
    head = next(heads)
    while world.redis("EXISTS", f"active:m:{LANES[0]}"):
        world.claim(jobs=rng.randint(1, 5), min_shares={"batch": share})
        for item in world.reply:
            passed = 0 if item.job.lane == "batch" else passed + item.cost_tokens
            head = next(heads) if item.job.lane == "batch" else head
            assert passed <= head / share + max(costs)


@scripts("""
none starts early; after an outage all that are due do, in the order of their starts
  submit t1 start_at_s=1700000020; submit t2 start_at_s=1700000010; submit t3 start_at_s=1700000010
  sweep; claim -> -
  pass_time 9.999; sweep; claim -> -
  pass_time 0.001; sweep; claim jobs=1 -> t2
  pass_time 9000; submit t5 deadline_s=9999; sweep; turns 2 -> t5 -
one whose start is over starts at once
  submit t1 start_at_s=1700000000; field t1 start -> None
  claim -> t1
they wait for no place, and are no load
  beat rate=10 jobs=1 tokens=20; submit t1 t2 t3 start_at_s=1700000010; place t9 -> 0 0 0.0
  waits t1 -> None
  number HGET counters:m:interactive queued_jobs -> 1.0
what waits now says nothing of them
  beat rate=10 jobs=1 tokens=20; submit t1 t2 t3 cost=20
  submit t8 lane=batch deadline_s=3 -> deadline_infeasible - 3.0
  submit t9 lane=batch deadline_s=3 start_at_s=1700000010 -> new
  pause batch; submit t7 lane=batch -> lane_paused - 30.0
  submit t7 lane=batch start_at_s=1700000010 -> new
they have a bound of their own, and a tenant its share of it
  submit t1 cost=20 lane_bound_tokens=40 lane_share=0.5 start_at_s=1700000010
  submit t2 cost=20 lane_bound_tokens=40 lane_share=0.5 -> new
  ask t3 lane_bound_tokens=40 lane_share=0.5 start_at_s=1700000010 -> tenant_quota lane_share 10.0
  submit u3 cost=30 lane_bound_tokens=40 start_at_s=1700000010 -> lane_full lane_tokens 10.0
  submit u4 lane_bound_tokens=40 start_at_s=1700000010 -> new
their deadline counts from the start, and moves along
  submit t1 deadline_s=5 start_at_s=1700000010; since t1 deadline -> -15.0
  move t1 start_at_s=1700000002; since t1 deadline -> -7.0
  move t1 deadline_s=9; since t1 deadline -> -11.0
  pass_time 1; move t1 start_at_s=5; since t1 deadline -> -9.0
  claim -> t1
  move t1 start_at_s=1700000010 -> RUNNING
  submit t2 deadline_s=9; move t2 start_at_s=1700000004; since t2 deadline -> -12.0
  claim -> -
  pass_time 3; sweep; claim -> t2
one that waits keeps its place where it is to start now
  submit t1 t2; move t1 start_at_s=9 -> OK
  turns 2 -> t1 t2
they go to another lane, and end
  submit t1 t2 start_at_s=1700000010; move t1 batch; cancel t2
  redis HGETALL later_tokens:m:interactive -> {}
  pass_time 10; sweep; claim lanes=batch -> t1
""")
def test_jobs_wait_for_their_start(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
an earlier one goes first, one of the same second behind those that were there
  submit t1 t2 deadline_s=90; submit t3 deadline_s=60; submit t4 deadline_s=60.9
  submit t5 deadline_s=30; submit t6 deadline_s=90
  turns 7 -> t5 t3 t4 t1 t2 t6 -
  redis EXISTS early:q:m:interactive:t -> 0
tenants take their turns as before
  submit t1 t2; submit u1 u2 deadline_s=9
  turns 4 -> t1 u1 t2 u2
one that does not fit is passed, and holds up those behind it alone
  submit t1 deadline_s=90; submit t2 cost=100 deadline_s=60; submit t3 deadline_s=70
  claim tokens=50 -> t3 t1
  field t2 passed -> 2
  submit t4 deadline_s=99; claim tokens=120 jobs=1 -> t2
one with a later deadline is not passed by them
  submit t1 cost=100 deadline_s=90; submit t2 deadline_s=60; claim tokens=50 -> t2
  field t1 passed -> None
another deadline is another place
  submit t1 t2 t3 deadline_s=90; move t3 deadline_s=30; move t1 deadline_s=99
  turns 3 -> t3 t2 t1
it waits for what goes before it
  beat rate=10 jobs=1 tokens=20; submit t1 t2 t3 t4 deadline_s=900
  place t5 deadline_s=60 -> 0 0 0.0
  place t6 deadline_s=90 -> 1 10 1.0
  place t7 deadline_s=30 -> 0 0 0.0
  place t8 deadline_s=950 -> 7 70 7.0
many that run do not hide those behind them
  submit t0 deadline_s=900
  submit ta tb tc td te tf tg th ti tj tk tl tm tn to tp tq tr deadline_s=60
  claim w 18; submit t9 deadline_s=999; turns 3 -> t0 t9 -
""")
def test_jobs_of_a_tenant_go_by_their_deadlines(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
the lower goes first, whatever their deadlines; of one, the earlier deadline, then as they came
  submit t1 t2; submit t3 priority=5 deadline_s=9; submit t4 priority=-1 deadline_s=900
  submit t5; submit t6 priority=-1 deadline_s=60; submit t7 priority=5 deadline_s=9
  turns 8 -> t6 t4 t1 t2 t5 t3 t7 -
  redis EXISTS early:q:m:interactive:t -> 0
tenants take their turns as before
  submit t1 t2; submit u1 u2 priority=-9; submit t3 priority=-524288
  turns 5 -> t3 u1 t1 u2 t2
and lanes
  submit t1; submit t2 lane=batch priority=-9; claim -> t1 t2
and jobs given back
  submit t1 t2; claim; release t1; release t2; submit t3 priority=-9; turns 3 -> t1 t2 t3
one that was passed often holds up those behind it alone
  submit t0 cost=100; submit t1 t2 t3 t4 t5 t6 t7 t8; claim tokens=50; claim tokens=50
  submit t9; claim tokens=50 -> -
  submit ta priority=-1; submit tb priority=1; claim tokens=50 -> ta
  claim tokens=110 -> t0 t9
one of several choices goes first where one of them just fits
  submit t1; submit t2 priority=-1 n=3 cost=33; claim tokens=11 jobs=1 -> t2
the least and the greatest are told apart from those beside them, at any time
  submit t1 priority=524287; submit t2 priority=524286 deadline_s=99999999
  submit t3 priority=-524287; submit t4 priority=-524288 deadline_s=99999999
  submit t5 deadline_s=99999999; submit t6 priority=524287 deadline_s=599
  turns 6 -> t4 t3 t5 t2 t6 t1
it stays with a job that starts later or is moved
  submit t1 t2; submit t3 priority=-1 start_at_s=1700000010
  submit t4 priority=-1; move t4 deadline_s=999; pass_time 10; sweep; turns 4 -> t3 t4 t1 t2
  submit t5 t6 lane=batch; submit t7 priority=-2; move t7 batch; turns 3 -> t7 t5 t6
what goes before it delays it, and what comes later and goes before
  beat rate=10 jobs=1 tokens=20; submit t1 t2; place t3 priority=-1 -> 0 0 0.0
  place t4 priority=5 -> 3 30 3.0
  place t5 -> 3 30 3.0
  place t6 priority=-1 -> 1 10 1.0
  waits t1 -> 2 20 2.0
  waits t4 -> 5 50 5.0
  ask t7 deadline_s=4 cap=0 priority=9 -> deadline_infeasible - 2.0
  ask t7 deadline_s=4 cap=0 -> OK
""")
def test_jobs_of_a_tenant_go_by_their_priority(calls: Calls, script: list[str]) -> None:
    """Before the deadline; none passes a job of another tenant."""
    calls.run(script)


@pytest.mark.parametrize("seed", range(6))
def test_every_place_counts_what_goes_before(world: World, seed: int) -> None:
    """Of jobs of one tenant that come, are claimed and are cancelled, at every step."""
    rng, waiting = random.Random(seed), list[tuple[int, int, str]]()
    for number in range(60):
        match rng.choices(["come", "claim", "cancel"], [5, 3, 1])[0]:
            case "come":
                priority, name = rng.choice([0, 0, -1, 1, 7, number]), f"t{number}"
                world.submit(name, priority=priority)
                waiting.append((priority, number, name))
                waiting.sort()
                assert world.ahead()[0] == waiting.index((priority, number, name))
            case "claim":
                assert world.claim(jobs=1) == [name for *_, name in waiting[:1]]
                waiting = waiting[1:]
            case "cancel" if waiting:
                world.cancel(waiting.pop(rng.randrange(len(waiting)))[-1])
        assert [world.waits(name)[0] for *_, name in waiting] == [*range(len(waiting))]
