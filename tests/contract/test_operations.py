"""Operations on many jobs: what they change, once each, however often they are interrupted."""

import os
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace

from contract.batches import LeaseLost
from contract.callbacks import Callback, CallbackKind
from contract.events import End
from contract.function_types import Append, Verdict, Wanted
from contract.functions import Functions
from contract.jobs import Job, JobStatus
from contract.keys import Keys
from contract.operations import (
    MAX_OPEN,
    Operation,
    OperationKind,
    Operations,
    OperationsFull,
    OperationState,
    new_operation_id,
)
from contract.outbox import Outbox
from tests.clock import clock_key
from tests.cluster import partition_of_test
from tests.contract.some_calls import append, claim, make_job, make_submission, pass_time, tokens

pytestmark = pytest.mark.anyio

LEASE_S = 10.0
CANCEL, REPLAY = OperationKind.CANCEL, OperationKind.REPLAY
ANY = Wanted(model="m")


@pytest.fixture
def keys() -> Keys:
    """A namespace in which no gateway of other tests works on operations. On a cluster, where these
    tests run without gateways, that of the test clock."""
    namespace = "test" if os.environ.get("BATCHWAY_TEST_CLUSTER") else "operations"
    return Keys(namespace, partition_of_test())


@pytest.fixture
def operations(redis_client: redis.asyncio.Redis, keys: Keys) -> Operations:
    return Operations(redis_client, keys)


async def submitted(functions: Functions, number: int, **names: Any) -> list[str]:
    terms = {name: names.pop(name) for name in ("metadata", "callback") if name in names}
    jobs = [make_job(**names) for _ in range(number)]
    for job in jobs:
        await functions.submit(job, make_submission(deadline_s=900, retention_s=900, **terms))
    return [job.id for job in jobs]


async def begun(
    operations: Operations,
    kind: OperationKind = CANCEL,
    wanted: Wanted = ANY,
    *,
    owner: str = "t",
    tenant: str = "t",
) -> str:
    operation_id = new_operation_id()
    await operations.add(operation_id, kind, wanted, owner=owner, tenant=tenant)
    return operation_id


async def found(operations: Operations, operation_id: str) -> Operation:
    operation = await operations.find(operation_id)
    assert operation is not None
    return operation


async def worked(operations: Operations, operation_id: str, max_looks: int = 500) -> Operation:
    """Works until the operation has ended."""
    assert await operations.take("a", lease_s=LEASE_S) == operation_id
    while True:
        step = await operations.step(operation_id, "a", lease_s=LEASE_S, max_looks=max_looks)
        if step.state is not OperationState.RUNNING:
            return await found(operations, operation_id)


async def states(functions: Functions, job_ids: list[str], tenant: str = "t") -> set[str]:
    views = [await functions.read(job_id, tenant) for job_id in job_ids]
    return {view[0].status for view in views if view is not None}


async def dead_letter(functions: Functions, outbox: Outbox, **names: Any) -> str:
    """A job whose callback was given up."""
    callback = Callback(kind=CallbackKind.URL, target="https://a.example/x")
    [job_id] = await submitted(functions, 1, callback=callback, **names)
    await functions.cancel(job_id, names.get("tenant", "t"))
    [taken] = await outbox.take(lease_s=10, max_messages=1, max_per_target=9)
    await outbox.done(taken, "dead")
    return job_id


async def test_each_job_is_cancelled_once_by_several_gateways(
    functions: Functions, operations: Operations, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """They take turns, one dies with the lease and one loses a reply: no job is left or cancelled
    twice. Running jobs end, too."""
    job_ids = await submitted(functions, 130)
    running = await claim(functions, max_jobs=20, max_tokens=9999)
    operation_id = await begun(operations)
    others = await submitted(functions, 1, tenant="u")
    assert await operations.take("a", lease_s=LEASE_S) == operation_id
    await operations.step(operation_id, "a", lease_s=LEASE_S, max_jobs=30)
    await operations.step(operation_id, "a", lease_s=LEASE_S, max_jobs=30)  # the reply is lost
    await operations.give_back(operation_id, "a")
    with pytest.raises(LeaseLost):
        await operations.step(operation_id, "a", lease_s=LEASE_S)
    assert await operations.take("b", lease_s=LEASE_S) == operation_id
    await operations.step(operation_id, "b", lease_s=LEASE_S, max_jobs=7)  # and it dies
    assert await operations.take("c", lease_s=LEASE_S) is None
    await pass_time(redis_client, keys, LEASE_S + 1)
    assert await operations.take("c", lease_s=LEASE_S) == operation_id
    with pytest.raises(LeaseLost):
        await operations.step(operation_id, "b", lease_s=LEASE_S)
    while (await found(operations, operation_id)).state is OperationState.RUNNING:
        await operations.step(operation_id, "c", lease_s=LEASE_S, max_jobs=30)

    operation = await found(operations, operation_id)
    counts = operation.state, operation.matched, operation.done, operation.failed
    assert counts == (OperationState.COMPLETED, 130, 130, 0)
    for job_id in job_ids:
        read = await functions.read(job_id, "t", max_events=9)
        assert read is not None
        assert [type(entry.event) for entry in read[1]] == [End], "one end, nothing else"
        assert read[0].status is JobStatus.CANCELLED
    item = Append(running[0].job.id, 1, 1, tokens(0, 7), 1)
    assert await append(functions, "w1", item) == [(JobStatus.CANCELLED, 0)]
    assert await states(functions, others, "u") == {"queued"}
    assert await redis_client.exists(keys.of("operations_open")) == 0


async def test_only_what_matches_is_cancelled(
    functions: Functions, operations: Operations, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Every filter; jobs of later are not meant, nor ended ones, nor calls of flows."""
    await redis_client.set(clock_key(), "=1700000000000")
    [old] = await submitted(functions, 1)
    await redis_client.set(clock_key(), "=1700000010000")
    [plain] = await submitted(functions, 1)
    [other_lane] = await submitted(functions, 1, lane="interactive")
    [marked] = await submitted(functions, 1, metadata={"run": "7", "x": "y"})
    call: Job = replace(make_job(), parent="job-0-" + "0" * 32)
    await functions.submit(call, make_submission(deadline_s=900))
    [[held]] = [await claim(functions, max_jobs=1)]
    assert held.job.id == other_lane
    for wanted, expected in (
        (Wanted(lanes=frozenset(["batch"])), []),
        (Wanted(model="other"), []),
        (Wanted(metadata={"run": "8"}), []),
        (Wanted(metadata={"run": "7"}), [marked]),
        (Wanted(statuses=frozenset([JobStatus.CLAIMED])), [other_lane]),
        (Wanted(created_before_ms=1700000010000), [old]),
        (Wanted(created_after_ms=1700000010000), []),
        (Wanted(statuses=frozenset([JobStatus.QUEUED])), [plain]),
        (Wanted(), []),
    ):
        operation = await worked(operations, await begun(operations, wanted=wanted))
        assert (operation.matched, operation.done) == (len(expected), len(expected)), wanted
        assert await states(functions, expected) <= {"cancelled"}
    assert await states(functions, [call.id]) == {"queued"}

    await redis_client.set(clock_key(), "=1700000020000")
    operation_id = await begun(operations)
    await redis_client.set(clock_key(), "=1700000020001")
    later = await submitted(functions, 1)
    await worked(operations, operation_id)
    assert await states(functions, later) == {"queued"}


@pytest.mark.parametrize("max_looks", [1, 2, 7, 500])
async def test_jobs_of_one_moment_are_all_met(
    functions: Functions,
    operations: Operations,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
    max_looks: int,
) -> None:
    """However many a step reads, and if the job where it stopped has been forgotten since."""
    await redis_client.set(clock_key(), "=1700000000000")
    job_ids = await submitted(functions, 20)
    operation_id = await begun(operations)
    assert await operations.take("a", lease_s=LEASE_S) == operation_id
    step = await operations.step(operation_id, "a", lease_s=LEASE_S, max_looks=max_looks)
    for job_id in job_ids:
        if await functions.delete(job_id, "t") is True:
            job_ids = [each for each in job_ids if each != job_id]
    while step.state is OperationState.RUNNING:
        step = await operations.step(operation_id, "a", lease_s=LEASE_S, max_looks=max_looks)
    assert (step.matched, step.done) == (20, 20)
    assert await states(functions, job_ids) <= {"cancelled"}


async def test_an_operation_reaches_all_tenants(
    functions: Functions, operations: Operations
) -> None:
    for number in range(12):
        await submitted(functions, 3, tenant=f"t{number}")
    operation = await worked(operations, await begun(operations, tenant=""), max_looks=2)
    assert (operation.tenant, operation.matched, operation.done) == ("", 36, 36)
    empty = await worked(operations, await begun(operations, tenant=""))
    assert (empty.state, empty.matched) == (OperationState.COMPLETED, 0)


async def test_replays_are_handed_out_and_reported_once(
    functions: Functions, operations: Operations, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """A gateway that dies before its report has its jobs handed out again; a repeated report
    counts once."""
    job_ids = await submitted(functions, 7)
    for each in await claim(functions):
        fin = Append(each.job.id, 1, 1, fin=JobStatus.FAILED, code="engine_error", message="it")
        assert await append(functions, "w1", fin) == [(Verdict.OK, 2)]
    wanted = Wanted(statuses=frozenset([JobStatus.FAILED]), error_code="engine_error")
    operation_id = await begun(operations, REPLAY, wanted)
    seen: list[str] = []
    await operations.take("a", lease_s=LEASE_S)
    lost = await operations.step(operation_id, "a", lease_s=LEASE_S, max_jobs=3)
    await pass_time(redis_client, keys, LEASE_S + 1)
    await operations.take("b", lease_s=LEASE_S)
    step = await operations.step(operation_id, "b", lease_s=LEASE_S, max_jobs=3)
    assert step.job_ids == lost.job_ids
    while step.state is OperationState.RUNNING:
        seen += step.job_ids
        number = len(step.job_ids)
        report = replace(step, matched=step.matched + number, done=step.done + number)
        for _ in range(2):
            step = await operations.step(
                operation_id, "b", lease_s=LEASE_S, reported=report, max_jobs=3
            )
    assert sorted(seen) == sorted(job_ids)
    assert (step.matched, step.done) == (7, 7)


async def test_dead_callbacks_are_replayed_by_filter(
    functions: Functions, operations: Operations, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """Also by the metadata of the job, while its record is kept."""
    outbox = Outbox(redis_client, keys)
    plain = await dead_letter(functions, outbox)
    marked = await dead_letter(functions, outbox, metadata={"run": "7"})
    other = await dead_letter(functions, outbox, tenant="u")
    kind = OperationKind.REPLAY_CALLBACKS
    for wanted, expected in (
        (Wanted(lanes=frozenset(["batch"])), 0),
        (Wanted(statuses=frozenset([JobStatus.FAILED])), 0),
        (Wanted(created_before_ms=1), 0),
        (Wanted(metadata={"run": "7"}), 1),
        (Wanted(statuses=frozenset([JobStatus.CANCELLED])), 1),
        (Wanted(model="m"), 0),
    ):
        operation = await worked(operations, await begun(operations, kind, wanted))
        assert (operation.matched, operation.done) == (expected, expected), wanted
    due = await outbox.take(lease_s=10, max_messages=9, max_per_target=9)
    assert {each.job_id for each in due} == {plain, marked}
    assert [each.record.job_id for each in await outbox.dead("u")] == [other]


async def test_operations_take_turns_and_have_bounds(
    functions: Functions, operations: Operations, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """The one that was worked on longest ago goes first; a tenant may have only so many."""
    await redis_client.set(clock_key(), "=1700000000000")
    await submitted(functions, 10)
    operation_ids = []
    for number in range(MAX_OPEN):
        await redis_client.set(clock_key(), f"={1700000000000 + number}")
        operation_ids.append(await begun(operations, REPLAY))
    with pytest.raises(OperationsFull):
        await begun(operations)
    await begun(operations, owner="u")
    for round_ms in (1_000, 2_000):
        for number, operation_id in enumerate(operation_ids):
            await redis_client.set(clock_key(), f"={1700000000000 + round_ms + number}")
            assert await operations.take("a", lease_s=LEASE_S, only=operation_id) == operation_id
            await operations.give_back(operation_id, "a")
    first = await operations.take("b", lease_s=LEASE_S)
    assert first is not None
    assert (await found(operations, first)).owner == "u"
    assert await operations.take("b", lease_s=LEASE_S) == operation_ids[0]
    listed = [each.id for each in await operations.of_owner("t")]
    assert listed == operation_ids[::-1]


async def test_an_operation_is_stopped_or_given_up(
    functions: Functions, operations: Operations, redis_client: redis.asyncio.Redis, keys: Keys
) -> None:
    """What it has done stays done. A day is enough."""
    job_ids = await submitted(functions, 10)
    operation_id = await begun(operations)
    await operations.take("a", lease_s=LEASE_S)
    await operations.step(operation_id, "a", lease_s=LEASE_S, max_jobs=4)
    assert await operations.stop(operation_id) is OperationState.CANCELLED
    step = await operations.step(operation_id, "a", lease_s=LEASE_S)
    assert (step.state, step.done) == (OperationState.CANCELLED, 4)
    assert await states(functions, job_ids) == {"queued", "cancelled"}
    assert await operations.stop(operation_id) is OperationState.CANCELLED
    assert await operations.stop("op-x") is None

    late = await begun(operations)
    await pass_time(redis_client, keys, 86_401)
    await operations.take("a", lease_s=LEASE_S)
    step = await operations.step(late, "a", lease_s=LEASE_S, max_looks=1, max_jobs=1)
    assert step.state is OperationState.EXPIRED
    assert await operations.take("a", lease_s=LEASE_S) is None
