"""One partition of a real Redis with a clock that stands still, and short calls of its functions.

Jobs have names in place of ids; the first letter of a name is the job's tenant. Replies are short
texts, so that a table of decisions can hold them (scripts.py).
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import redis

from contract.batches import Batches
from contract.callbacks import Callback, CallbackKind
from contract.connection import connect
from contract.errors import BatchwayError, BrokerFull, JobRefused
from contract.events import ChoiceDelta, Tokens
from contract.files import Files
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    LaneRoom,
    Release,
    Submission,
    TenantLimits,
    Wanted,
    WorkerCapacity,
)
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, ObjectRef, SamplingParams, StoredPrompt
from contract.keys import Keys
from contract.operations import Operations
from contract.outbox import DoneVerdict, Outbox, Taken
from contract.pauses import PauseLine, Pauses
from contract.residence import marks_of
from tests.clock import TEST_CLOCK, library_with_test_clock
from tests.oracle.audit import Audit

LANES = ("interactive", "batch")
LEASE_S = 10.0
NOW_MS = 1_700_000_000_000
PROMPT = 3  # tokens of each job
REF = ObjectRef("store", "key", "0" * 64, 1)
CALLBACKS = {
    name: Callback(
        kind=CallbackKind.URL,
        target=f"https://{name}/",
        notifies_start=name == "talks",
        progress_tokens=2 if name == "talks" else 0,
    )
    for name in ("a", "b", "talks", *(f"c{i}" for i in range(8)))
}
T = TypeVar("T")


@contextmanager
def new_world(redis_url: str, caller: Any = None) -> Iterator["World"]:
    """An empty partition with the library loaded."""
    world = World(redis_url, caller)
    try:
        yield world
    finally:
        world.close()


class World:
    """Callers, workers and time. Keeps what each worker believes to hold."""

    def __init__(self, redis_url: str, caller: Any = None) -> None:
        """`caller`: a client for the calls of functions, in place of its own."""
        self.keys = keys = Keys("world")
        self.client = redis.Redis.from_url(redis_url)
        self.client.flushall()
        self.client.function_load(library_with_test_clock(), replace=True)
        self._loop = asyncio.new_event_loop()
        self._client = caller or connect(redis_url, keys)
        self.functions = Functions(self._client, keys)
        self.outbox = Outbox(self._client, keys)
        self.pauses = Pauses(self._client, keys)
        self.operations = Operations(self._client, keys)
        self.files = Files(self._client, keys)
        self.batches = Batches(self._client, keys)
        self.audit = Audit(self.client, keys)
        # worker → job → epoch and next number
        self.held: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self.logged: Counter[str] = Counter()  # output tokens of each job
        self.reply: Any = None  # the last one that is kept as it came
        self.now_ms = NOW_MS
        self.pass_time(0)

    def close(self) -> None:
        self.run(self._client.aclose())
        self._loop.close()
        self.client.delete(TEST_CLOCK)
        self.client.close()

    def run(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self._loop.run_until_complete(awaited())

    def told(self, call: Awaitable[Any]) -> Any:
        """The reply, or the name of the error."""
        try:
            return self.run(call)
        except BatchwayError as error:
            return type(error).__name__

    def pass_time(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)
        self.client.set(TEST_CLOCK, f"={self.now_ms}")

    def redis(self, verb: str, key: str, *words: str | float) -> Any:
        """A command on a key of the partition; text for bytes."""
        reply = self.client.execute_command(verb, f"{self.keys.tag}:{key}", *words)  # type: ignore[no-untyped-call]
        return _text(reply)

    def field(self, job: str, *names: str) -> list[str]:
        """Fields of a job's record."""
        return [self.redis("HGET", f"job:{job_id(job)}", name) for name in names]

    # --- callers ------------------------------------------------------------------------------

    def submit(self, *names: str, **terms: Any) -> str:
        """'new', 'known <job>', or the refusal of the last: code, limit, s to a retry. Terms: see
        `_asked`."""
        said = ""
        for name in names:
            said = self._answered(self.functions.submit(*_asked(name, **terms)))
        return said

    def quote(self, name: str, **terms: Any) -> str:
        """'OK', or the refusal."""
        return self._answered(self.functions.quote(*_asked(name, **terms)))

    def _answered(self, call: Awaitable[Any]) -> str:
        try:
            self.reply = self.run(call)
        except JobRefused as refused:
            self.reply = refused
            return _refusal(refused)
        except BrokerFull as full:
            return str(full.code)
        if hasattr(self.reply, "cost_tokens"):
            return _refusal(self.reply.refusal) if self.reply.refusal else "OK"
        return "new" if self.reply.is_new else f"known {name_of(self.reply.job_id)}"

    def ahead(self) -> tuple[int, int, float | None]:
        """Of the last reply: jobs ahead, tokens ahead, s until it starts."""
        found = self.reply.position
        return found.num_jobs_ahead, found.num_tokens_ahead, found.eta_s

    def view(self, name: str, tenant: str = "") -> Any:
        """A job as its caller reads it; None where the tenant has none."""
        found = self.run(self.functions.read(job_id(name), tenant or name[0], max_events=999))
        self.reply = found[0] if found else None
        return self.reply

    def status(self, name: str, tenant: str = "") -> str:
        found = self.view(name, tenant)
        return str(found.status) if found else "none"

    def waits(self, name: str) -> Any:
        """The place of a waiting job, as its caller reads it."""
        return self.ahead() if self.view(name).position else None

    def listed(self, tenant: str, wanted: Wanted = Wanted(), **terms: Any) -> list[str]:  # noqa: B008
        """The names of a page; then, where there is more, `after:<job>`."""
        page = self.run(self.functions.list_jobs(tenant, wanted, **terms))
        if page is None:
            return ["none"]
        names = [name_of(view.job.id) for view in page.views]
        return [*names, f"after:{name_of(page.position)}"] if page.position else names

    def cancel(self, name: str, tenant: str = "") -> Any:
        return self.run(self.functions.cancel(job_id(name), tenant or name[0]))

    def delete(self, name: str, tenant: str = "") -> Any:
        return self.run(self.functions.delete(job_id(name), tenant or name[0]))

    def detach(self, name: str, deadline_s: float, retention_s: float, tenant: str = "") -> Any:
        terms = {"deadline_s": deadline_s, "retention_s": retention_s}
        return self.run(self.functions.detach(job_id(name), tenant or name[0], **terms))

    def move(
        self,
        name: str,
        lane: str = "",
        deadline_s: float | None = None,
        tenant: str = "",
        start_at_s: float | None = None,
    ) -> Any:
        terms: dict[str, Any] = {"lane": lane, "deadline_s": deadline_s, "start_at_s": start_at_s}
        return self.run(self.functions.reprioritise(job_id(name), tenant or name[0], **terms))

    def attend(self, *names: str) -> int:
        return self.run(self.functions.attend(list(map(job_id, names))))

    def pause(self, lane: str = "", tenant: str = "") -> None:
        self.run(self.pauses.pause(PauseLine("m", lane, tenant), "operator"))

    def resume(self, lane: str = "", tenant: str = "") -> bool:
        return self.run(self.pauses.resume(PauseLine("m", lane, tenant), "operator"))

    # --- workers ------------------------------------------------------------------------------

    def claim(
        self,
        worker: str = "w",
        jobs: int = 8,
        tokens: int = 10_000,
        *,
        lanes: Sequence[str] = LANES,
        rooms: Mapping[str, LaneRoom] | None = None,
        loses_reply: bool = False,
        **options: Any,
    ) -> list[str]:
        """The names of the claimed jobs; behind that of a suspect `!`."""
        bounds: dict[str, Any] = {"lease_s": LEASE_S, "max_jobs": jobs, "max_tokens": tokens}
        options |= bounds | {"rooms": rooms}
        found = self.run(self.functions.claim(worker, "m", lanes, **options))
        return self._believe(worker, found, loses_reply=loses_reply)

    def mine(self, worker: str = "w") -> list[str]:
        known = [job_id(name) for name in self.held[worker]]
        found = self.run(self.functions.mine(worker, known, lease_s=LEASE_S))
        return sorted(self._believe(worker, found))

    def _believe(
        self, worker: str, found: list[Claimed], *, loses_reply: bool = False
    ) -> list[str]:
        self.reply = found
        if not loses_reply:
            held = {name_of(item.job.id): (item.epoch, item.next_number) for item in found}
            self.held[worker].update(held)
        return [name_of(item.job.id) + ("!" if item.is_alone else "") for item in found]

    def says(
        self,
        name: str,
        num: int = 1,
        fin: str = "",
        *,
        worker: str = "w",
        shift: int = 0,
        epoch: int | None = None,
        cached: int = 0,
        **terms: Any,
    ) -> Append:
        """An item by the worker's belief; `shift` 1 leaves a gap, -1 repeats an event. `cached`:
        tokens of the prompt."""
        known, number = self.held[worker].get(name, (1, 1))
        start = self.logged[name]
        token_ids = tuple(range(start, start + num))
        deltas = (ChoiceDelta(0, start, token_ids, "x" * num),)
        event = Tokens(deltas, cached) if num else None
        terms.setdefault("code", "engine_error" if fin == "failed" else "")
        terms["fin"] = JobStatus(fin) if fin else ""
        epoch = known if epoch is None else epoch
        return Append(job_id(name), epoch, max(1, number + shift), event, num, **terms)

    def append_all(
        self, items: Sequence[Append], worker: str = "w", lease_s: float = LEASE_S
    ) -> list[str]:
        """A verdict and a number for each item."""
        reply = self.run(self.functions.append(worker, items, lease_s=lease_s))
        for item, (verdict, number) in zip(items, reply, strict=True):
            name = name_of(item.job_id)
            if verdict == "OK":
                is_new = number > self.held[worker].get(name, (1, 1))[1]
                self.logged[name] += item.num_tokens if is_new else 0
                self.held[worker][name] = (item.epoch, number)
        return [f"{verdict} {number}" for verdict, number in reply]

    def append(self, name: str, num: int = 1, fin: str = "", **terms: Any) -> str:
        worker, lease_s = terms.get("worker", "w"), terms.pop("lease_s", LEASE_S)
        return self.append_all([self.says(name, num, fin, **terms)], worker, lease_s)[0]

    def release(self, name: str, kind: str = "drain", worker: str = "w") -> str:
        epoch, _ = self.held[worker].get(name, (1, 1))
        item = Release(job_id(name), epoch, kind, "engine_error", "it broke")  # type: ignore[arg-type]
        return str(self.run(self.functions.release(worker, [item]))[0][0])

    def blame(self, name: str, max_crashes: int = 2, worker: str = "w") -> str:
        epoch, _ = self.held[worker].get(name, (1, 1))
        items = [Blame(job_id(name), epoch, "{}")]
        return str(self.run(self.functions.blame(worker, items, max_crashes=max_crashes))[0][0])

    def beat(
        self,
        worker: str = "w",
        rate: float = 0.0,
        *,
        stream: float = 0.0,
        jobs: int = 0,
        tokens: int = 0,
        lanes: Sequence[str] = LANES,
        min_shares: Mapping[str, float] | None = None,
        info: str = "{}",
        **options: Any,
    ) -> list[str]:
        """The names of the jobs that the worker lost."""
        capacity = WorkerCapacity(rate, stream, tokens, jobs, tuple(lanes), min_shares or {})
        held = [(job_id(name), epoch) for name, (epoch, _) in sorted(self.held[worker].items())]
        says = {"lease_s": LEASE_S, "info": info, "capacity": capacity, **options}
        lost = self.run(self.functions.heartbeat(worker, "m", held, **says))
        for each in lost:
            del self.held[worker][name_of(each)]
        return [name_of(each) for each in lost]

    def drain(self, *workers: str) -> list[bool]:
        return self.run(self.functions.drain(workers))

    def sweep(self, max_jobs: int = 400) -> tuple[int, int, int, int]:
        """Lapsed, expired, unattended, forgotten jobs; the reply has those whose start has come."""
        self.reply = found = self.run(self.functions.sweep(max_jobs))
        return found.num_lapsed, found.num_expired, found.num_unattended, found.num_forgotten

    # --- deliverers of callbacks --------------------------------------------------------------

    def take(self, room: int = 50, per_target: int = 2) -> list[Taken]:
        terms = {"lease_s": LEASE_S, "max_messages": room, "max_per_target": per_target}
        return self.run(self.outbox.take(**terms))  # type: ignore[arg-type]

    def done(self, taken: Taken, outcome: Any, delay_s: float = 0.0) -> DoneVerdict:
        return self.run(self.outbox.done(taken, outcome, delay_s=delay_s))

    def due(self) -> list[str]:
        """The messages that are due now, `<job>:<kind>`; delivers them."""
        told = []
        while taken := self.take():
            for each in taken:
                record = self.run(self.outbox.start(each, lease_s=LEASE_S))
                told.append(f"{name_of(each.job_id)}:{record.kind if record else None}")
                self.done(each, "delivered")
        return told


def job_id(name: str) -> str:
    return f"job-0-{name}"


def name_of(each: str) -> str:
    return each.removeprefix("job-0-")


def contents(world: World) -> dict[str, Any]:
    """All of Redis, but counts of refusals, promises, and the reading of the memory."""
    passing = ("totals:", "promised:", "memory", "test_clock")
    keys: Any = world.client.keys(f"{world.keys.tag}:*")
    names = [key.decode() for key in keys]
    names = [name.removeprefix(f"{world.keys.tag}:") for name in names]
    names = [name for name in names if not name.startswith(passing)]
    # The order of a long hash's fields may change as it is read.
    kinds = {name: world.redis("TYPE", name) for name in names}
    return {n: world.redis("HGETALL" if kinds[n] == "hash" else "DUMP", n) for n in names}


def _refusal(refused: JobRefused) -> str:
    return " ".join([refused.code, refused.limit or "-", str(refused.retry_after_s)])


_LIMITS = TenantLimits.__struct_fields__


def _asked(
    name: str,
    *,
    lane: str = LANES[0],
    cost: int = 10,
    cap: int | None = None,
    n: int = 1,
    weight: float = 1.0,
    expects: int = 0,
    grammar: str = "",
    model: str = "m",
    parent: str = "",
    is_stored: bool = False,
    is_chat: bool = False,
    route: str = "",
    session: str = "",
    callback: str = "",
    **terms: Any,
) -> tuple[Job, Submission]:
    """A job with a prompt of three tokens. `cap`: output tokens in all, at first the `cost` without
    the prompt; other terms are those of a Submission and of TenantLimits."""
    cap = cost - PROMPT if cap is None else cap
    job = Job(
        id=job_id(name),
        tenant=name[0],
        model=model,
        lane=lane,
        endpoint=Endpoint.CHAT if is_chat else Endpoint.COMPLETIONS,
        response=b"{}" if is_chat else b"",
        asked_model=route,
        prompt_ids=() if is_stored else tuple(range(PROMPT)),
        stored_prompt=StoredPrompt(REF, PROMPT, 1) if is_stored else None,
        params=SamplingParams(
            max_tokens=cap // n, seed=0, n=n, expected_tokens=expects, grammar=grammar
        ),
        created_s=0,
        weight=weight,
        parent=parent,
        session=session,
    )
    limits = TenantLimits(**{name: terms.pop(name) for name in _LIMITS if name in terms})
    fields = {"max_output_tokens": cap, "deadline_s": 600.0, "retention_s": 600.0} | terms
    fields["marks"] = marks_of(job)
    return job, Submission(**fields, limits=limits, callback=CALLBACKS.get(callback))


def _text(reply: Any) -> Any:
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    if isinstance(reply, dict):
        return {_text(name): _text(value) for name, value in reply.items()}
    if isinstance(reply, set):
        return sorted(map(_text, reply))
    return [_text(part) for part in reply] if isinstance(reply, list) else reply
