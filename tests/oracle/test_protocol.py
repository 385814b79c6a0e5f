"""The functions in Redis, compared with the reference step by step; every invariant is audited.

Over 300 lines: one state machine with a rule for each function.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from contract.batches import BatchStatus
from contract.function_types import Wanted, WorkerState
from contract.operations import OperationState
from contract.outbox import Outcome, Taken
from infra.embedded_redis import EmbeddedRedis
from tests.oracle.files_walk import FilesWalk
from tests.oracle.operations_walk import OperationsWalk
from tests.oracle.postal_walk import PostalWalk
from tests.oracle.postmen import NOBODY
from tests.oracle.reference_files import END_KINDS
from tests.oracle.walk import ROOMS, Walk
from tests.oracle.whole_walk import Draws, walk
from tests.oracle.world import CALLBACKS, LANES, STATES, TENANTS, WORKERS, World

pytestmark = pytest.mark.campaign

workers = st.sampled_from(WORKERS)
tenants = st.sampled_from(TENANTS)
lanes = st.sampled_from(LANES)

ENDED_BATCHES = tuple(status.value for status in END_KINDS)
REFUSALS = (
    "unknown_lane",
    "lane_paused",
    "no_workers",
    "storage_full",
    "tenant_quota stored_bytes",
    "tenant_quota requests_per_min",
    "tenant_quota tokens_per_min",
    "tenant_quota concurrent_tokens",
    "tenant_quota lane_share",
    "tenant_quota tenant_memory",
    "lane_full lane_memory",
    "lane_full lane_tokens",
    "lane_full lane_wait",
    "deadline_infeasible",
)

# The replies of each function. The walk must get each of them TIMES.
REPLIES = {
    "enter": ("None", "tenant_quota requests_per_min"),
    "submit": ("new", "known", "idempotency_mismatch", "memory_full", *REFUSALS),
    "quote": ("OK", *REFUSALS),
    "read": ("place", "nothing"),
    "snapshot": ("totals",),
    "watch": ("some", "none"),
    "claim": ("job", "alone", "nothing"),
    "mine": ("job", "nothing"),  # and "alone", seldom
    "append": (
        "OK",
        "GAP",
        "OVER",
        "FENCED",
        "GONE",
        "succeeded",
        "failed",
        "cancelled",
        "expired",
    ),
    "release": ("OK", "FENCED", "GONE", "succeeded", "failed", "cancelled", "expired"),
    "blame": ("OK", "FENCED", "GONE", "succeeded", "failed", "cancelled", "expired"),
    "heartbeat": ("lost", "nothing"),
    "drain": ("True", "False"),
    "cancel": ("None", "cancelled", "succeeded", "failed", "expired"),
    "reprioritise": ("None", "OK", "succeeded", "failed", "cancelled", "expired"),
    "detach": ("None", "OK", "succeeded", "failed", "cancelled", "expired"),
    "attend": ("some", "none"),
    "delete": ("True", "False", "queued", "claimed", "streaming"),
    "pause": ("paused",),
    "resume": ("True", "False"),
    "list_jobs": ("some", "none", "some and more", "none and more", "None"),
    "sweep": ("lapsed", "expired", "unattended", "forgotten", "nothing"),
}
OUTBOX_REPLIES = {
    "outbox_take": ("some", "nothing"),
    "outbox_start": ("a message", "None"),
    "outbox_renew": ("OK", "lost"),
    "outbox_done": ("OK", "SUPERSEDED", "FENCED", "GONE"),
    "outbox_dead": ("some", "nothing"),
    "outbox_replay": ("None", "due", "taken", "idle", "delivered"),
}
FILES_REPLIES = {
    "file_begin": ("None",),
    "file_add": ("a file", "FilesFull"),
    "file_drop": ("True", "False"),
    "objects_due": ("some", "nothing"),
    "objects_deleted": ("None",),
    "batch_add": ("None", "BatchesFull"),
    "batch_cancel": ("None", "cancelling", "finalizing", *ENDED_BATCHES),
    "batch_take": ("some", "nothing"),
    "batch_save": ("LeaseLost", "StatusChanged", *BatchStatus),
}
OPERATIONS_REPLIES = {
    "operation_add": ("None", "OperationsFull"),
    "operation_take": ("an operation", "None"),
    "operation_step": ("LeaseLost", *OperationState),
    "operation_stop": ("None", "cancelled", "completed"),
}
TIMES = 3
MAX_STEPS = 60_000
_WALK_STEPS = 150
# Walks that together reach every reply: in any order it takes up to three hundred.
SEEDS = {
    "jobs": (
        *(1000, 1001, 1006, 1041, 1070, 1072, 1077, 1080, 1083, 1101, 1102, 1119, 1128, 1137, 1149),
        *(1161, 1287),
    ),
    "outbox": (1002, 1006, 1032),
    "files": (1017, 1018, 1033, 1043, 1051),
    "operations": (1009, 1027, 1033),
}


class ProtocolMachine(RuleBasedStateMachine):
    """Hypothesis orders the steps and shrinks failures; the world audits Redis after each step."""

    redis_url = ""

    @initialize()
    def start(self) -> None:
        self.world = World(self.redis_url)

    @rule(
        tenant=tenants,
        lane=lanes,
        cost=st.integers(4, 10),
        deadline_s=st.sampled_from([5, 60]),
        attendance_s=st.sampled_from([0, 9]),
        key=st.sampled_from(["", "", "k"]),
        callback=st.sampled_from([None, *CALLBACKS]),
        body=st.sampled_from("ab"),
        is_stored=st.booleans(),
        enters=st.booleans(),
    )
    def submit(self, **fields: Any) -> None:
        self.world.submit(**fields)

    @rule(data=st.data(), tenant=tenants)
    def cancel(self, data: st.DataObject, tenant: str) -> None:
        self.world.cancel(self._job(data), tenant)

    @rule(data=st.data(), tenant=tenants, lane=lanes, deadline_s=st.sampled_from([None, 5]))
    def reprioritise(
        self, data: st.DataObject, tenant: str, lane: str, deadline_s: float | None
    ) -> None:
        self.world.reprioritise(self._job(data), tenant, lane, deadline_s)

    @rule(data=st.data(), tenant=tenants)
    def delete(self, data: st.DataObject, tenant: str) -> None:
        self.world.delete(self._job(data), tenant)

    @rule(tenant=tenants, lane=st.sampled_from(["", *LANES]), max_looks=st.sampled_from([1, 500]))
    def list_jobs(self, tenant: str, lane: str, max_looks: int) -> None:
        self.world.list_jobs(
            tenant, Wanted(lanes=frozenset([lane] if lane else [])), max_jobs=2, max_looks=max_looks
        )

    @rule(
        data=st.data(),
        tenant=tenants,
        deadline_s=st.sampled_from([5, 90]),
        retention_s=st.sampled_from([6, 900]),
    )
    def detach(self, data: st.DataObject, **terms: Any) -> None:
        self.world.detach(self._job(data), **terms)

    @rule(data=st.data())
    def attend(self, data: st.DataObject) -> None:
        self.world.attend([self._job(data)])

    @rule(
        worker=workers,
        max_jobs=st.integers(1, 4),
        max_tokens=st.sampled_from([8, 1000]),
        is_idle=st.booleans(),
        loses_reply=st.booleans(),
    )
    def claim(self, **fields: Any) -> None:
        self.world.claim(**fields)

    @rule(worker=workers)
    def mine(self, worker: str) -> None:
        self.world.mine(worker)

    @rule(
        data=st.data(),
        worker=workers,
        num_tokens=st.integers(0, 3),
        fin=st.sampled_from(["", "", "succeeded", "failed"]),
        shift=st.sampled_from([0, 0, -1, 1]),
        loses_reply=st.booleans(),
        is_kept_elsewhere=st.booleans(),
    )
    def append(self, data: st.DataObject, worker: str, **fields: Any) -> None:
        self.world.append(worker, self._job(data), **fields)

    @rule(worker=workers, state=st.sampled_from(STATES))
    def heartbeat(self, worker: str, state: WorkerState) -> None:
        self.world.heartbeat(worker, state)

    @rule(worker=workers)
    def drain(self, worker: str) -> None:
        self.world.drain(worker)

    @rule(data=st.data(), worker=workers, kind=st.sampled_from(["drain", "error", "offer"]))
    def release(self, data: st.DataObject, worker: str, kind: str) -> None:
        self.world.release(worker, self._job(data), kind)

    @rule(data=st.data(), worker=workers, max_crashes=st.sampled_from([2, 3]))
    def blame(self, data: st.DataObject, worker: str, max_crashes: int) -> None:
        self.world.blame(worker, self._job(data), max_crashes)

    @rule(room=st.sampled_from([1, 9]))
    def take(self, room: int) -> None:
        self.world.postmen.take(room)

    @rule(data=st.data())
    def start_delivery(self, data: st.DataObject) -> None:
        self.world.postmen.start(self._taken(data))

    @rule(
        data=st.data(),
        outcome=st.sampled_from(["delivered", "retry", "dead"]),
        delay_s=st.sampled_from([0, 7]),
    )
    def end_delivery(self, data: st.DataObject, outcome: Outcome, delay_s: float) -> None:
        self.world.postmen.done(self._taken(data), outcome, delay_s)

    @rule(data=st.data(), tenant=tenants)
    def replay(self, data: st.DataObject, tenant: str) -> None:
        self.world.postmen.replay(self._job(data), tenant)

    @rule()
    def sweep(self) -> None:
        self.world.sweep()

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(room=st.sampled_from(ROOMS))
    def fill_memory(self, room: int | None) -> None:
        self.world.fill_memory(room)

    @rule(seconds=st.sampled_from([1, 6, 11]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.settle()
            finally:
                self.world.close()

    def _job(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([*self.world.job_ids, "job-0-none"]))

    def _taken(self, data: st.DataObject) -> Taken:
        return data.draw(st.sampled_from([*self.world.postmen.taken[-5:], NOBODY]))


@pytest.mark.timeout(600)
def test_any_order_of_steps_keeps_every_invariant(redis_server: EmbeddedRedis) -> None:
    """Hypothesis looks for an order that violates one, or for which function and reference
    differ."""
    ProtocolMachine.redis_url = redis_server.url
    case = ProtocolMachine.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()


class QuotingWalk(Walk):
    """Requests a quote instead of every seventh job, so that rare replies to quotes occur early."""

    def _submit(self, is_quote: bool = False) -> None:
        super()._submit(is_quote or self._flip(0.15))


@pytest.mark.timeout(600)
def test_every_reply_of_every_function_is_reached(redis_server: EmbeddedRedis) -> None:
    """A random walk gets each reply several times, and never a wrong one.

    Replies are compared at every step; here Redis is audited at every tenth.
    """
    counts = count_replies(redis_server.url, REPLIES, QuotingWalk, TIMES, SEEDS["jobs"])
    known = {f"{name} {reply}" for name, replies in REPLIES.items() for reply in replies}
    found = {reply for reply in counts if not reply.startswith(("outbox_", "operation_"))}
    assert found <= {*known, "mine alone"}, "no reply is unknown to this test"


@pytest.mark.timeout(600)
def test_every_reply_of_the_outbox_is_reached(redis_server: EmbeddedRedis) -> None:
    """Each reply of the functions that relays call, four times, in a walk mostly of their calls."""
    counts = count_replies(redis_server.url, OUTBOX_REPLIES, PostalWalk, 4, SEEDS["outbox"])
    known = {f"{name} {reply}" for name, replies in OUTBOX_REPLIES.items() for reply in replies}
    assert {reply for reply in counts if reply.startswith("outbox_")} <= known


@pytest.mark.timeout(600)
def test_every_reply_of_files_and_batches_is_reached(redis_server: EmbeddedRedis) -> None:
    """In a walk mostly of their calls."""
    counts = count_replies(redis_server.url, FILES_REPLIES, FilesWalk, TIMES, SEEDS["files"])
    known = {f"{name} {reply}" for name, replies in FILES_REPLIES.items() for reply in replies}
    found = {reply for reply in counts if reply.startswith(("file_", "objects_", "batch_"))}
    assert found <= known


@pytest.mark.timeout(600)
def test_every_reply_of_operations_is_reached(redis_server: EmbeddedRedis) -> None:
    """In a walk mostly of their calls."""
    seeds = SEEDS["operations"]
    counts = count_replies(redis_server.url, OPERATIONS_REPLIES, OperationsWalk, TIMES, seeds)
    known = {f"{name} {reply}" for name, replies in OPERATIONS_REPLIES.items() for reply in replies}
    found = {reply for reply in counts if reply.startswith("operation_")}
    assert found <= {*known, "operation_stop expired"}


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("draws", [QuotingWalk, PostalWalk, FilesWalk, OperationsWalk])
def test_many_walks_keep_to_the_reference(redis_server: EmbeddedRedis, draws: Draws) -> None:
    for seed in range(1000, 1300):
        walk(redis_server.url, seed, _WALK_STEPS, audit_every=10, draws=draws)


def count_replies(
    redis_url: str,
    replies: dict[str, tuple[str, ...]],
    draws: Draws,
    times: int,
    seeds: Sequence[int],
) -> Counter[str]:
    """Walks, with these seeds and then others, until each reply has occurred often enough."""
    counts: Counter[str] = Counter()
    wanted = [f"{name} {reply}" for name, names in replies.items() for reply in names]
    for number, seed in enumerate(chain(seeds, count(2000))):
        if not (missing := [reply for reply in wanted if counts[reply] < times]):
            return counts
        assert number * _WALK_STEPS < MAX_STEPS, {reply: counts[reply] for reply in missing}
        counts += walk(redis_url, seed, _WALK_STEPS, audit_every=10, draws=draws)
    raise AssertionError("unreachable")
