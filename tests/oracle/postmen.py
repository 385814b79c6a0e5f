"""Relays and receivers in the small world: the outbox in Redis, compared with its reference."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from contract.callbacks import OutboxState
from contract.outbox import Outbox, OutboxRecord, Outcome, Taken

if TYPE_CHECKING:
    from tests.oracle.world import World

LEASE_S = 10.0
MAX_PER_TARGET = 2  # the same in every call, as in an installation
NOBODY = Taken("job-0-none", 1)
T = TypeVar("T")


class Postmen:
    """The messages that relays believe to hold, and the comparison of all replies to them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._outbox = Outbox(world.async_client, world.keys)
        self._there = world.reference.outbox
        self.taken: list[Taken] = []  # the youngest last; also those whose attempt is over

    def take(self, max_messages: int) -> None:
        """Redis may choose among the due messages; the reference gives the set."""
        now_ms = self._world.reference.now_ms
        wanted = self._there.can_be_taken(now_ms, MAX_PER_TARGET)
        reply = self._call(
            "take", lease_s=LEASE_S, max_messages=max_messages, max_per_target=MAX_PER_TARGET
        )
        by_target: dict[str, set[str]] = {}
        for taken in reply:
            to = self._there.entries[taken.job_id].destination
            by_target.setdefault(to, set()).add(taken.job_id)
        for to, job_ids in by_target.items():
            due, number = wanted[to]
            assert job_ids <= due, "only what is due is taken"
            assert len(job_ids) <= number, "no destination is sent more than its share"
        self._there.lapse(now_ms, {to for to in wanted if self._has_lapsed(to)})
        for num_taken, taken in enumerate(reply):
            tenant = self._there.entries[taken.job_id].tenant
            may_take = self._there.may_take(tenant, max_messages - num_taken, now_ms)
            assert may_take, "no tenant takes more than its share of the places"
            self._there.take(taken, lease_s=LEASE_S, now_ms=now_ms)
        for to, (due, number) in wanted.items():
            left = due - by_target.get(to, set())
            tenant = self._there.entries[min(due)].tenant
            if left and len(by_target.get(to, ())) < number:
                num_free = max_messages - len(reply)
                may_take = self._there.may_take(tenant, num_free, now_ms)
                assert not may_take, "what is due is taken"
        self.taken += reply
        self._heard("take", ["some"] if reply else ["nothing"])

    def start(self, taken: Taken) -> None:
        reply: OutboxRecord | None = self._call("start", taken, lease_s=LEASE_S)
        want = self._there.start(taken, lease_s=LEASE_S, now_ms=self._world.reference.now_ms)
        assert (reply and reply.kind) == want
        if reply is not None:
            entry = self._there.entries[taken.job_id]
            assert (reply.number, reply.failures) == (entry.number, entry.failures)
        self._heard("start", ["a message" if reply else "None"])

    def renew(self, taken: Taken) -> None:
        reply = self._call("renew", taken, lease_s=LEASE_S)
        now_ms = self._world.reference.now_ms
        want = self._there.start(taken, lease_s=LEASE_S, now_ms=now_ms, renews=True)
        assert reply == (want is not None)
        self._heard("renew", ["OK" if reply else "lost"])

    def done(self, taken: Taken, outcome: Outcome, delay_s: float) -> None:
        now_ms = self._world.reference.now_ms
        reply = self._call("done", taken, outcome, delay_s=delay_s)
        assert reply == self._there.done(taken, outcome, delay_s=delay_s, now_ms=now_ms)
        self._heard("done", [str(reply)])

    def replay(self, job_id: str, tenant: str) -> None:
        reply = self._call("replay", job_id, tenant)
        assert reply == self._there.replay(job_id, tenant, now_ms=self._world.reference.now_ms)
        self._heard("replay", [str(reply)])

    def dead(self, tenant: str) -> None:
        letters = self._call("dead", tenant)
        assert {letter.record.job_id for letter in letters} == self._there.dead(tenant)
        for letter in letters:
            assert letter.record.state is OutboxState.DEAD
            [alone] = self._call("dead", tenant, job_id=letter.record.job_id)
            assert alone == letter
        self._heard("dead", ["some" if letters else "nothing"])

    def deliver_all(self) -> None:
        """Receivers accept again: every message is delivered."""
        while any(e.state in (OutboxState.DUE, OutboxState.TAKEN) for e in self._entries()):
            self._world.pass_time(100)  # longer than any lease and any rung of these tests
            self.take(1000)
            for taken in self.taken[-1000:]:
                self.done(taken, "delivered", 0)

    def compare(self) -> None:
        """The records in Redis are those of the reference."""
        names = ("state", "kind", "number", "attempt", "failures")
        entries = self._there.entries
        with self._world.client.pipeline(transaction=False) as pipe:
            for job_id in entries:
                pipe.hmget(self._world.keys.of("out", job_id), names)
            replies: Any = pipe.execute()
        for (job_id, entry), values in zip(entries.items(), replies, strict=True):
            there = {n: v.decode() if v else "0" for n, v in zip(names, values, strict=True)}
            here = {name: str(getattr(entry, name)) for name in names}
            assert there == here, f"{job_id}: Redis has {there}, the reference {here}"

    def _entries(self) -> list[Any]:
        return list(self._there.entries.values())

    def _has_lapsed(self, to: str) -> bool:
        """Whether Redis visited a destination with expired leases."""
        now_ms = self._world.reference.now_ms
        flying: Any = self._world.client.zrange(
            self._world.keys.of("flying", to), 0, now_ms, byscore=True
        )
        return not flying

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        method: Callable[..., Awaitable[Any]] = getattr(self._outbox, name)

        async def run() -> Any:
            return await method(*args, **options)

        self._world.hold_clock()
        return self._world.loop.run_until_complete(run())

    def _heard(self, name: str, kinds: list[str]) -> None:
        self._world.replies.update(f"outbox_{name} {kind}" for kind in kinds)
        self._world.after_step()
