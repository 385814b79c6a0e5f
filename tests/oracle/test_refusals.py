"""Which jobs are accepted: each refusal with its time of a retry, and what is predicted of a job.

A job costs 10 tokens where a script does not say otherwise. A worker computes 10 a second.
"""

from typing import Any

from tests.oracle.scripts import Calls, scripts
from tests.oracle.world import LANES, World


@scripts("""
a lane that no worker serves: beat lanes=batch,other; ask t9 -> unknown_lane batch other None
a lane that one of several serves: beat lanes=batch,interactive; ask t9 -> OK
a paused lane: pause interactive; ask t9 -> lane_paused - 30.0
another paused lane: pause batch; ask t9 -> OK
a paused tenant: pause '' t; ask t9 -> lane_paused - 30.0
another paused tenant: pause '' u; ask t9 -> OK
a tenant paused in a lane: pause interactive t; ask t9 -> lane_paused - 30.0
a tenant paused in another: pause batch t; ask t9 -> OK
a pause of another model: redis HSET paused 'n * t' '9 operator'; ask t9 -> OK
a pause of all models: redis HSET paused '* * t' '9 operator'; ask t9 -> lane_paused - 30.0
a call of a flow is not held by a pause: submit t1; pause '' t; ask t9 parent=job-0-t1 -> OK
no worker: ask t9 needs_worker=True -> no_workers - None
a live worker: beat; ask t9 needs_worker=True -> OK
a live worker, at last: beat; pass_time 15; ask t9 needs_worker=True -> OK
one that lives no more: beat; pass_time 15.001; ask t9 needs_worker=True -> no_workers - None
all the bytes: ask t9 max_stored_bytes=1 -> storage_full - None
all the tenant's bytes: ask t9 max_tenant_stored_bytes=1 -> tenant_quota stored_bytes None
a share of no bound: submit t1 t2; ask t9 lane_share=0.1 -> OK
a late end, no rate: submit t1 t2; ask t9 deadline_s=0.5 -> OK
a cold start in time: ask t9 cold_start_s=9 deadline_s=9 -> OK
a late cold start: ask t9 cold_start_s=9 deadline_s=8 -> deadline_infeasible - 1.0
unfinished tokens, no rate
  submit t1; ask t9 concurrent_tokens=10 -> tenant_quota concurrent_tokens 10.0
a wait of as many as run at once, no rate
  beat jobs=1 tokens=10; submit t1; ask t9 lane_bound_s=9 -> lane_full lane_wait 10.0
a wait of fewer, no rate: beat jobs=2 tokens=20; submit t1; ask t9 lane_bound_s=9 -> OK
a share of a lane, no rate
  submit t1; ask t9 lane_share=0.5 lane_bound_tokens=30 -> tenant_quota lane_share 10.0
a full lane, no rate: submit t1; ask t9 lane_bound_tokens=15 -> lane_full lane_tokens 10.0
a job above a limit, no rate
  ask t9 concurrent_tokens=9 -> tenant_quota concurrent_tokens None
""")
def test_a_quote_and_a_submission_say_the_same(calls: Calls, script: list[str]) -> None:
    """What is refused writes nothing but its promise."""
    calls.run(script)


@scripts("""
unfinished tokens: ask t9 concurrent_tokens=25 -> tenant_quota concurrent_tokens 0.5
unfinished tokens that fit: ask t9 concurrent_tokens=30 -> OK
a job above the limit: ask t9 concurrent_tokens=9 -> tenant_quota concurrent_tokens None
of another tenant: ask u9 concurrent_tokens=25 -> OK
a share of the lane: ask t9 lane_share=0.5 lane_bound_tokens=50 -> tenant_quota lane_share 0.5
a share that fits: ask t9 lane_share=0.5 lane_bound_tokens=60 -> OK
a job above its share: ask t9 lane_share=0.1 lane_bound_tokens=60 -> tenant_quota lane_share None
others in the lane: ask u9 lane_share=0.5 lane_bound_tokens=50 -> OK
a full lane: ask t9 lane_bound_tokens=25 -> lane_full lane_tokens 0.5
a lane that is full then: ask t9 lane_bound_tokens=30 -> OK
a job above the lane's bound: ask t9 lane_bound_tokens=9 -> lane_full lane_tokens None
another lane: ask t9 lane=batch lane_bound_tokens=25 -> OK
a long wait: ask t9 lane_bound_s=1.5 -> lane_full lane_wait 0.5
a wait that is allowed: ask t9 lane_bound_s=2 -> OK
a cold start is no wait
  pass_time 15.001; ask t9 lane_bound_s=2 cold_start_s=9 -> OK
a long wait beside a cold start
  pass_time 15.001; ask t9 lane_bound_s=1.5 cold_start_s=9 -> lane_full lane_wait 0.5
a late end behind those that end before
  move t1 deadline_s=1; move t2 deadline_s=1; ask t9 deadline_s=1.5 -> deadline_infeasible - 0.5
an end before theirs: ask t9 deadline_s=1.5 -> OK
an end in time: ask t9 deadline_s=2 -> OK
a full lane beside one with a share
  beat rate=10 jobs=1 tokens=10 shares=batch:0.5; submit u1 lane=batch
  ask t9 lane_bound_tokens=25 -> lane_full lane_tokens 1.0
a share of a lane beside one with a share
  beat rate=10 jobs=1 tokens=10 shares=batch:0.5; submit u1 lane=batch
  ask t9 lane_share=0.5 lane_bound_tokens=50 -> tenant_quota lane_share 1.0
""")
def test_what_waits_bounds_what_comes(calls: Calls, script: list[str]) -> None:
    calls.run(["beat rate=10 jobs=1 tokens=10; submit t1 t2", *script])


@scripts("""
requests: ask t9 requests_per_min=2 -> tenant_quota requests_per_min 30.0
requests that leak: pass_time 30; ask t9 requests_per_min=2 -> OK
requests that leak in half a second
  pass_time 29.5; ask t9 requests_per_min=2 -> tenant_quota requests_per_min 0.5
requests of the future
  pass_time -30; ask t9 requests_per_min=2 -> tenant_quota requests_per_min 30.0
more requests: ask t9 requests_per_min=3 -> OK
tokens: ask t9 tokens_per_min=60 -> tenant_quota tokens_per_min 1.0
tokens that just fit: ask t9 tokens_per_min=61 -> OK
tokens that leak: pass_time 1; ask t9 tokens_per_min=60 -> OK
tokens above the limit: ask t9 tokens_per_min=9 -> tenant_quota tokens_per_min None
a job of the whole limit: pass_time 400; ask t9 tokens_per_min=10 -> OK
tokens at half the price: ask t9 tokens_per_min=56 lane=batch batch_price=0.5 -> OK
too many at half the price
  ask t9 tokens_per_min=55 lane=batch batch_price=0.5 -> tenant_quota tokens_per_min 1.091
the price of another lane
  ask t9 tokens_per_min=60 batch_price=0.5 -> tenant_quota tokens_per_min 1.0
""")
def test_meters_leak(calls: Calls, script: list[str]) -> None:
    """The tenant's hold 2 requests and 51 tokens."""
    fields = "reserved 0 requests 2 requests_ms NOW tokens 51 tokens_ms NOW"
    calls.run([f"redis HSET tenant:t {fields}; redis EXPIRE tenant:t 9", *script])


@scripts("""
a worker to come: pass_time -5; ask t9 needs_worker=True -> no_workers - 5.0
one that comes now: pass_time -0.5; ask t9 needs_worker=True -> no_workers - 1.0
a late one: pass_time 60; ask t9 needs_worker=True -> no_workers - 1.0
one given up: pass_time 60.001; ask t9 needs_worker=True -> no_workers - None
""")
def test_a_worker_is_announced(calls: Calls, script: list[str]) -> None:
    calls.run(["redis HSET pool:m ready_at NOW", *script])


@scripts("""
a longer run than its time: ask t9 deadline_s=2 expects=5 -> deadline_infeasible - None
a run in time: ask t9 deadline_s=2.5 expects=5 -> OK
an expectation above the cap: ask t9 deadline_s=3.5 expects=99 -> OK
a run of several choices: ask t9 deadline_s=2.5 expects=5 n=2 cap=14 -> OK
a run of unknown length: ask t9 deadline_s=2 -> OK
no output: ask t9 deadline_s=0.1 cap=0 -> OK
""")
def test_a_run_takes_time(calls: Calls, script: list[str]) -> None:
    """A stream has two tokens a second."""
    calls.run(["beat rate=10 stream=2", *script])


def test_the_first_reason_counts(world: World) -> None:
    """All reasons hold at once; then one after the other is gone."""
    world.beat(rate=10.0, jobs=1, tokens=10, lanes=LANES[:1])
    world.submit("t1", "t2", requests_per_min=9, deadline_s=16.4)
    meters = ("requests", 9, "requests_ms", world.now_ms, "tokens", 99, "tokens_ms", world.now_ms)
    world.redis("HSET", "tenant:t", *meters)
    world.redis("HSET", "pool:m", "lanes", "batch")
    world.redis("SET", "memory", 30_000)
    world.pause(LANES[0])
    world.pass_time(16)
    terms: dict[str, Any] = {"deadline_s": 0.5, "lane_bound_s": 0.4, "lane_bound_tokens": 25}
    terms |= {"max_tenant_stored_bytes": 1, "max_stored_bytes": 1, "needs_worker": True}
    terms |= {"requests_per_min": 1, "tokens_per_min": 11, "concurrent_tokens": 25}
    terms["lane_share"] = 0.5
    said = world.quote("t9", **terms)
    assert said.startswith("unknown_lane batch")
    world.redis("HSET", "pool:m", "lanes", "interactive")
    assert world.quote("t9", **terms).startswith("lane_paused")
    world.resume(LANES[0])
    for name, limit in (
        ("needs_worker", "no_workers -"),
        ("max_stored_bytes", "storage_full -"),
        ("max_tenant_stored_bytes", "tenant_quota stored_bytes"),
        ("requests_per_min", "tenant_quota requests_per_min"),
        ("tokens_per_min", "tenant_quota tokens_per_min"),
        ("concurrent_tokens", "tenant_quota concurrent_tokens"),
        ("lane_share", "tenant_quota lane_share"),
        ("", "lane_full lane_memory"),
        ("lane_bound_tokens", "lane_full lane_tokens"),
        ("lane_bound_s", "lane_full lane_wait"),
        ("deadline_s", "deadline_infeasible -"),
        ("", "OK"),
    ):
        said = world.quote("t9", **terms)
        assert said.startswith(limit), (said, limit)
        terms.pop(name, None)
        if limit.endswith("lane_memory"):
            world.redis("SET", "memory", "free")


@scripts("""
one after another, at half of the rate, and lines in turns
  submit t1 t2; submit t9 lane_bound_tokens=25 -> lane_full lane_tokens 0.5
  submit t9 lane_bound_tokens=25 -> lane_full lane_tokens 2.5
  submit t9 lane_bound_tokens=25 -> lane_full lane_tokens 4.5
  submit u9 lane_bound_tokens=25 -> lane_full lane_tokens 2.5
  submit v9 lane_bound_tokens=25 -> lane_full lane_tokens 4.5
  submit u9 lane_bound_tokens=25 -> lane_full lane_tokens 6.5
  quote t9 lane_bound_tokens=25; quote t9 lane_bound_tokens=25 -> lane_full lane_tokens 6.5
  pass_time 6.5; submit t9 lane_bound_tokens=25 -> lane_full lane_tokens 4.5
  submit u9 lane_bound_tokens=25 -> lane_full lane_tokens 6.0
  pass_time 3600; submit t9 lane_bound_tokens=25 -> lane_full lane_tokens 0.5
  redis ZCARD promised:m -> 1
a promise ends where a job finds room
  submit t1; submit t2 lane_bound_tokens=10; redis ZRANGE promised:m 0 -1 -> interactive t
  submit u1; redis ZRANGE promised:m 0 -1 -> interactive t
  cancel t1; cancel u1; submit t3; redis EXISTS promised:m -> 0
  submit t4 requests_per_min=1; submit t5 requests_per_min=1; redis EXISTS promised:m -> 0
a promise is at most an hour
  beat rate=1 jobs=1 tokens=10; submit t1 cost=3003
  submit t2 cost=3003 lane_bound_tokens=3003 -> lane_full lane_tokens 3003.0
  submit t2 cost=3003 lane_bound_tokens=3003 -> lane_full lane_tokens 3600.0
""")
def test_those_who_were_refused_return_in_turns(calls: Calls, script: list[str]) -> None:
    calls.run(["beat rate=10 jobs=1 tokens=10", *script])


@scripts("""
the same id: submit t1; submit t1 -> known t1
the same key: submit t2 idempotency_key=k body_hash=b -> known t1
another body: submit t2 idempotency_key=k body_hash=c -> idempotency_mismatch - None
another key: submit t2 idempotency_key=l body_hash=b -> new
another tenant: submit u2 idempotency_key=k body_hash=b -> new
a repetition is not counted, and meets no limit
  submit t2 idempotency_key=k body_hash=b requests_per_min=1 -> known t1
  redis HGET tenant:t requests -> 1
  submit t2 requests_per_min=1 -> tenant_quota requests_per_min 60.0
  redis HGET totals:m refusals_total:interactive:tenant_quota -> 1
a refused one is not known
  submit u2 idempotency_key=k body_hash=b lane_bound_tokens=1
  submit u3 idempotency_key=k body_hash=b -> new
""")
def test_a_repeated_call_meets_its_job(calls: Calls, script: list[str]) -> None:
    calls.run(["submit t1 idempotency_key=k body_hash=b requests_per_min=1", *script])


@scripts("""
it is counted once
  enter t 2; submit t1 requests_per_min=2 is_counted=True; redis HGET tenant:t requests -> 1
  enter t 2; submit t1 requests_per_min=2 is_counted=True; redis HGET tenant:t requests -> 1
  enter t 2
  submit t2 requests_per_min=2 is_counted=True lane_bound_tokens=1 -> lane_full lane_tokens None
  redis HGET tenant:t requests -> 1
  enter t 2 -> None
  enter t 2 -> JobRefused
  redis HGET tenant:t requests -> 2
  pass_time 30; enter t 2 -> None
one without jobs leaves a record that expires
  enter t 2; redis HGET tenant:t reserved -> 0
  redis TTL tenant:t -> 86400
one without a limit leaves none
  enter t 0 -> None
  redis EXISTS tenant:t -> 0
""")
def test_a_call_enters_before_its_job(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
it has what was used, at the price of the lane
  submit t1 lane=batch batch_price=0.5 tokens_per_min=60; redis HGET tenant:t tokens -> 5
  submit t2 tokens_per_min=60; redis HGET tenant:t tokens -> 15
  claim; pass_time 1; append t1 2 succeeded; number HGET tenant:t tokens -> 11.5
  submit t3 lane=batch batch_price=0.5 tokens_per_min=60; number HGET tenant:t tokens -> 16.5
  move t3 interactive; number HGET tenant:t tokens -> 21.5
  move t3 batch; number HGET tenant:t tokens -> 16.5
  cancel t3; number HGET tenant:t tokens -> 11.5
  pass_time 60; append t2 1 failed; number HGET tenant:t tokens -> 0.0
  submit t4 requests_per_min=9; number HGET tenant:t tokens -> 0.0
  cancel t4; run_job t5 6 tokens_per_min=60; number HGET tenant:t tokens -> 9.0
what was cached counts at its price, in its lane
  submit t1 cached_price=0.5 tokens_per_min=60; claim; append t1 2 succeeded cached=2
  number HGET tenant:t tokens -> 4.0
  field t1 cached charge prompt_tokens -> 2 5 3
  redis HGET totals:m prompt_tokens_cached_total:interactive -> 2
what was cached of the prompts of a job, at its price in the lane batch
  submit t1 lane=batch cached_price=0 batch_price=0.5 tokens_per_min=60; claim; append t1 2 cached=1
  append t1 1 cached=1; append t1; append t1 1 shift=-1 cached=1; append t1 1 succeeded
  number HGET tenant:t tokens -> 3.0
  field t1 cached -> 2
a price that is none
  submit t1 cached_price=2 tokens_per_min=60; claim; append t1 2 succeeded cached=2
  number HGET tenant:t tokens -> 5.0
without a price it counts as any other
  submit t1 tokens_per_min=60; claim; append t1 2 succeeded cached=2
  number HGET tenant:t tokens -> 5.0
a cost grows with what is drawn, by the excess and 32 tokens, up to the cap
  outputs 1 1 1 1 1; submit t9 cap=100 tokens_per_min=1000; claim; append t9; field t9 cost -> 4
  append t9; field t9 cost -> 37
  redis HGET tenant:t reserved -> 37
  redis HGET tenant:t tokens -> 37
  redis HGET counters:m:interactive running_tokens -> 37
  append t9 31; append t9; field t9 cost -> 37
  append t9 60 -> OK 6
  field t9 cost -> 103
  append t9 7 -> OVER 94
a bill is what was used; what nobody claimed costs nothing
  submit t1; cancel t1; start t2 events=2; cancel t2; field t1 charge refund -> 0 10
  field t2 charge refund -> 5 5
""")
def test_a_tenant_s_meter_of_tokens(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
nothing is known: costs t9 -> 13
too few: outputs 2 2 2 2; costs t9 -> 13
what was seen: outputs 2 2 2 2 2; costs t9 -> 5
no more than the cap: outputs 9 9 9 9 9; costs t9 cap=4 -> 7
an expectation above: outputs 2 2 2 2 2; costs t9 expects=6 -> 9
an expectation below: outputs 4 4 4 4 4; costs t9 expects=1 -> 7
an expectation alone: costs t9 expects=6 -> 13
choices: outputs 2 2 2 2 2; costs t9 n=3 cap=30 -> 9
outputs of two choices: outputs 4 4 4 4 4 n=2; costs t9 -> 5
another tenant: outputs 2 2 2 2 2; costs u9 -> 5
another lane: outputs 2 2 2 2 2; costs t9 lane=batch -> 13
longer ones count a fifth: outputs 2 2 2 2 7; costs t9 -> 6
shorter ones a fiftieth: outputs 7 7 7 7 2; costs t9 -> 10
no output: outputs 2 2 2 2 2; costs t9 cap=0 -> 3
one that was cut and is longer: outputs 2 2 2 2 2 10; costs t9 -> 7
some that failed: outputs 6 6 6 6 6 -1 -1 -1; costs t9 -> 9
failures alone: outputs -1 -1 -1 -1 -1; costs t9 -> 13
a failure does not begin it: outputs -1 2 2 2 2; costs t9 -> 13
outputs that a caller steers lower the cap slowly
  outputs 1 1 1 1 1 grammar=x; redis GET lengths:m:interactive:t -> 9.9282157121440004 5
  costs t9 cap=30 -> 13
""")
def test_a_cost_is_learned_from_outputs(calls: Calls, script: list[str]) -> None:
    calls.run(script)


@scripts("""
nobody: place t9 -> 0 0 0.0
one runs: start t1 cost=20; place t9 -> 0 0 2.0
own: submit t1 t2 cost=20; place t9 -> 2 40 4.0
another's, as many for one: submit u1 u2 t1 cost=20; place t9 -> 2 40 4.0
others alone: submit u1 u2 cost=20; place t9 -> 0 0 0.0
a lane above: submit u1 cost=20; place t9 lane=batch -> 1 20 2.0
a lane below: submit u1 cost=20 lane=batch; place t9 -> 0 0 0.0
running ones of both: start u1 cost=20 lane=batch; start u2 cost=40; place t9 -> 0 0 4.0
room beside what runs: beat rate=10 jobs=2 tokens=30; start t1 cost=20; place t9 -> 0 0 0.0
no room in tokens: beat rate=10 jobs=2 tokens=29; start t1 cost=20; place t9 -> 0 0 2.0
no room in jobs: beat rate=10 jobs=1 tokens=99; start t1 cost=20; place t9 -> 0 0 2.0
half computed: start t1 cost=20; append t1 7; place t9 -> 0 0 1.0
less than half: start t1 cost=20; append t1 2; place t9 -> 0 0 1.5
of weight 3: submit u1 u2 u3 t1 cost=20; place t9 weight=3 -> 1 26 2.6
others of weight 3: submit u1 u2 u3 cost=20 weight=3; submit t1 cost=20; place t9 -> 4 80 8.0
""")
def test_the_work_ahead_tells_the_wait(calls: Calls, script: list[str]) -> None:
    """Jobs and tokens ahead, s until it starts."""
    calls.run(["beat rate=10 jobs=1 tokens=20", *script])


@scripts("""
what other lanes are guaranteed is left out while they have work
  beat rate=10 jobs=1 tokens=1000 lanes=interactive,standard,batch shares=standard:0.2,batch:0.1
  submit t1 t2 t3 t4 t5 t6 t7; quote t9; ahead -> 7 70 7.0
  submit u1 lane=batch; submit u2 lane=standard; quote t9; ahead -> 7 70 10.0
  quote t9 lane_bound_s=8 -> lane_full lane_wait 2.0
a lower lane has the rate that urgent lanes leave, by what was claimed of late
  submit t1 t2 t3 t4 t5; claim lanes=interactive,standard; submit t6 t7 t8 t9 lane=standard
  quote t0 lane=standard; ahead -> 4 40 10.0
  pass_time 15; quote t0 lane=standard; ahead -> 4 40 6.667
  pass_time 5; beat rate=10 jobs=1 tokens=1000 lanes=interactive,standard,batch
  quote t0 lane=standard; ahead -> 4 40 5.0
jobs that began together end together; those of less urgent lanes give way
  submit t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 lane=standard; claim w 10 lanes=standard
  quote u9 lane=standard; ahead -> 0 0 10.0
  quote u9; ahead -> 0 0 1.0
  submit v0 v1 v2 v3 v4 v5 v6 v7 v8 v9; claim w 10; quote u9 lane=standard; ahead -> 0 0 20.0
  beat rate=10 jobs=1 tokens=1000 lanes=interactive,standard,batch shares=standard:0.5
  quote u9 lane=standard; ahead -> 0 0 10.0
a flooded lane above leaves a guaranteed share, or a twentieth
  beat rate=10 jobs=1 tokens=1000 lanes=interactive,standard,batch shares=standard:0.2
  submit t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 u0 u1 u2 u3 u4 u5 u6 u7 u8 u9
  claim w 10; submit v1 v2 lane=standard; quote v9 lane=standard; ahead -> 12 120 15.0
  quote v9 lane=batch deadline_s=9999; ahead -> 12 120 260.0
""")
def test_lanes_share_the_rate_of_the_workers(calls: Calls, script: list[str]) -> None:
    lanes = "lanes=interactive,standard,batch"
    calls.run([f"beat rate=10 jobs=1 tokens=1000 {lanes}", *script])
