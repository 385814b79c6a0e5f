"""A Redis with as much in it as at an installation's worst hour, brought there by the product's own
calls, and the processor time that its main thread takes for each function."""

import asyncio
import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio

from contract.api_keys import KeyTerms
from contract.batches import Batches, NewBatch, new_batch_id
from contract.callbacks import Callback, CallbackKind
from contract.connection import connect, end_tasks
from contract.events import ChoiceDelta, TokenLogprob, Tokens
from contract.files import Files, StoredFile, new_file_id
from contract.function_types import (
    Append,
    Claimed,
    Submission,
    TenantLimits,
    Wanted,
    WorkerCapacity,
)
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.operations import OperationKind, Operations, new_operation_id
from contract.outbox import Outbox, Taken
from contract.pauses import PauseLine, Pauses
from contract.residence import marks_of
from infra.embedded_redis import EmbeddedRedis
from workers.callbacks.service import MAX_TAKEN

TENANTS = tuple(f"tenant-{n:03}" for n in range(256))
BIG = TENANTS[0]  # has most of everything
LANES = ("interactive", "standard", "batch", "scoring")
URGENT = "urgent"  # of jobs that are claimed at once
SERVED = (URGENT, *LANES)
MODEL = "org/model-7b"
WORKERS = tuple(f"worker-{n:02}" for n in range(64))
HOLDER, CANDIDATE, CLAIMER = WORKERS[:3]
LONG_TOKENS, NUM_TOP = 8_192, 20
LEASE_S = 600.0
FOREVER_S = 86_400.0
CAPACITY = WorkerCapacity(20_000.0, 60.0, 4_000_000, 256, SERVED, {"batch": 0.05, "scoring": 0.1})
LIMITS = TenantLimits(requests_per_min=10**6, tokens_per_min=10**9, concurrent_tokens=10**9)


class Meter:
    """Measures each function that a client calls: ns of the server's main thread, by function."""

    def __init__(self, client: redis.asyncio.Redis, pid: int) -> None:
        self._thread = Path(f"/proc/{pid}/task/{pid}")
        self._call: Any = client.execute_command
        self.is_on = False
        self.spent: dict[str, list[int]] = defaultdict(list)
        setattr(client, "execute_command", self.execute)  # noqa: B010 - it is a method

    def now_ns(self) -> int:
        """Once it sleeps: a running thread's time is brought up to date now and then."""
        while (self._thread / "stat").read_text().rpartition(")")[2].split()[0] != "S":
            pass
        return int((self._thread / "schedstat").read_text().split()[0])

    async def execute(self, *words: Any, **options: Any) -> Any:
        name = str(words[1]).partition("_v1_")[2] if str(words[0]).startswith("FCALL") else ""
        if not self.is_on or not (name or words[0] == "PING"):
            return await self._call(*words, **options)
        before_ns = self.now_ns()
        try:
            return await self._call(*words, **options)
        finally:
            self.spent[name or "PING"].append(self.now_ns() - before_ns)


async def at_once(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Runs calls, a few at a time."""
    limit = asyncio.Semaphore(32)

    async def run(call: Awaitable[Any]) -> Any:
        async with limit:
            return await call

    return await asyncio.gather(*map(run, calls))


class CrowdedRedis:
    """The state."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.rng = random.Random(1)
        self._socket = str(server.directory / "redis.sock")
        self._following: asyncio.Task[None] | None = None
        self.keys = Keys("crowded")
        self.client = connect(server.url, self.keys, command_timeout_s=60.0)
        self.meter = Meter(self.client, server.pid)
        where = self.client, self.keys
        self.functions, self.outbox = Functions(*where), Outbox(*where)
        self.batches, self.files = Batches(*where), Files(*where)
        self.operations, self.pauses = Operations(*where), Pauses(*where)
        self.open = TENANTS  # those that submit jobs
        self.held: list[Claimed] = []  # by HOLDER, with short logs
        self.long: list[Claimed] = []  # by HOLDER, with long ones
        self.numbers: dict[str, int] = {}  # of the held jobs' next events
        self.ended: list[Job] = []  # with long logs
        self.attended: list[str] = []  # ids of waiting jobs
        self._prompt = tuple(self.rng.randrange(150_000) for _ in range(4_000))
        self._events = [self._event(position) for position in range(512)]

    # --- jobs

    def _event(self, position: int) -> tuple[Tokens, int]:
        """One step's output of a choice, and its tokens: now and then no text yet, or what came
        together while Redis was slow."""
        rng = self.rng
        number = rng.choices((1, 2, 5), (90, 8, 2))[0]
        ids = tuple(rng.randrange(150_000) for _ in range(number))

        def scores() -> tuple[tuple[int, float], ...]:
            return tuple((rng.randrange(150_000), -20 * rng.random()) for _ in range(NUM_TOP))

        logprobs = tuple(TokenLogprob(each, -rng.random(), scores()) for each in ids)
        text = rng.choice(("", " word", " long word", "\n", "é")) * number
        return Tokens((ChoiceDelta(0, position, ids, text, None, logprobs),)), number

    def event(self, position: int) -> tuple[Tokens, int]:
        return self._events[position % len(self._events)]

    def job(self, tenant: str, lane: str, **fields: Any) -> Job:
        rng = self.rng
        num_prompt = fields.pop("num_prompt", rng.choice((50, 300, 2_000)))
        defaults: dict[str, Any] = {
            "id": new_job_id(),
            "tenant": tenant,
            "model": MODEL,
            "lane": lane,
            "endpoint": Endpoint.CHAT,
            "prompt_ids": self._prompt[:num_prompt],
            "params": SamplingParams(max_tokens=500, seed=1),
            "created_s": 0,
            "weight": 1.0 + int(tenant[-3:]) % 4,
        }
        return Job(**(defaults | fields))

    def callback(self, number: int = 0, **fields: Any) -> Callback:
        target = f"https://hooks-{number}.example.com/batchway"
        return Callback(kind=CallbackKind.URL, target=target, secret="s" * 40, **fields)

    def submission(self, job: Job, **terms: Any) -> Submission:
        defaults: dict[str, Any] = {
            "max_output_tokens": job.params.max_tokens * job.params.n,
            "deadline_s": FOREVER_S,
            "retention_s": FOREVER_S,
            "limits": LIMITS,
            "lane_bound_tokens": 10**9,
            "metadata": {"team": "a", "run": job.id[-8:]},
        }
        return Submission(**(defaults | terms))

    async def submit(self, job: Job, **terms: Any) -> Job:
        await self.functions.submit(job, self.submission(job, marks=marks_of(job), **terms))
        return job

    async def submit_many(
        self, number: int, tenant: str = "", lane: str = "", fields: Any = None, **terms: Any
    ) -> list[Job]:
        """Of one tenant and lane, or ('') of all in turns."""
        jobs = [
            self.job(
                tenant or self.open[n % len(self.open)],
                lane or LANES[n // len(self.open) % 4],
                **(fields or {}),
            )
            for n in range(number)
        ]
        await at_once(self.submit(job, **terms) for job in jobs)
        return jobs

    async def claimed(
        self, number: int, lane: str = URGENT, worker: str = HOLDER, lease_s: float = LEASE_S
    ) -> list[Claimed]:
        """The next jobs of a lane, whichever configuration they are for."""
        found: list[Claimed] = []
        arms = itertools.cycle(("", " candidate"))
        while len(found) < number:
            found += await self.functions.claim(
                worker, MODEL, [lane], lease_s=lease_s, max_jobs=number - len(found),
                max_tokens=10**9, config_version=next(arms),
            )  # fmt: skip
        self.numbers |= {each.job.id: each.next_number for each in found}
        return found

    def items(self, held: Sequence[Claimed], **end: Any) -> list[Append]:
        """The next event of each job."""
        items = []
        for each in held:
            number = self.numbers[each.job.id]
            event, num_tokens = self.event(number)
            items.append(Append(each.job.id, each.epoch, number, event, num_tokens, **end))
            self.numbers[each.job.id] = number + 1
        return items

    async def run(self, held: Sequence[Claimed], num_steps: int) -> None:
        """Appends so many steps' output."""
        for _ in range(num_steps):
            await self.functions.append(HOLDER, self.items(held), lease_s=0)

    async def finish(self, held: Sequence[Claimed]) -> None:
        for each in held:
            items = self.items([each], fin=JobStatus.SUCCEEDED)
            await self.functions.append(HOLDER, items, lease_s=0)

    async def running(
        self,
        number: int,
        tenant: str = "",
        num_steps: int = 3,
        lease_s: float = LEASE_S,
        **terms: Any,
    ) -> list[Claimed]:
        """New jobs that HOLDER runs, with some output."""
        await self.submit_many(number, tenant, URGENT, **terms)
        held = await self.claimed(number, lease_s=lease_s)
        await self.run(held, num_steps)
        return held

    def take_long(self, number: int) -> list[Claimed]:
        """Running jobs with long answers, which the caller ends."""
        taken, self.long = self.long[:number], self.long[number:]
        assert len(taken) == number
        return taken

    def take_ended(self, number: int) -> list[Job]:
        taken, self.ended = self.ended[:number], self.ended[number:]
        assert len(taken) == number
        return taken

    async def sweep(self) -> None:
        """Until nothing is due."""
        while any(msgspec.structs.astuple(await self.functions.sweep())):
            pass

    # --- the whole

    async def follow(self, held: Sequence[Claimed]) -> None:
        """Reads what is published of jobs, as a gateway does whose callers follow them."""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        channels = " ".join(self.keys.of("ev", each.job.id) for each in held)
        writer.write(f"SUBSCRIBE {channels}\r\n".encode())

        async def read() -> None:
            with contextlib.closing(writer):
                while await reader.read(2**20):
                    pass

        self._following = asyncio.create_task(read())

    async def aclose(self) -> None:
        if self._following is not None:
            await end_tasks(self._following)
        await self.client.aclose()

    async def fill(self, num_long: int, num_ended: int) -> None:
        await self._run_jobs(num_long, num_ended)
        await self.report_workers()
        await self.submit_many(700, BIG, "standard")
        await self.submit_many(3_000, callback=self.callback(1))
        attended = await self.submit_many(6_300, attendance_s=FOREVER_S)
        self.attended = [job.id for job in attended]
        await self._post_callbacks()
        await self._keep_files()
        await self._open_operations()
        self.open = TENANTS[:156]
        for n, tenant in enumerate(TENANTS[156:]):
            await self.pauses.pause(PauseLine(lane=LANES[n % 4], tenant=tenant), "tenant")

    async def report_workers(self) -> None:
        """All live, one with the candidate of two configurations; two others are draining."""
        for worker in WORKERS:
            share = {"candidate_share": 0.3} if worker == CANDIDATE else {}
            info = {"batching": "c0ffee12" if share else "bea6cb1e", **share, "jobs_held": 1}
            await self.report(worker, info)
        for worker in ("draining-1", "draining-2"):
            await self.report(worker, {}, state="draining")

    async def report(
        self, worker: str, info: dict[str, Any], held: Any = (), **terms: Any
    ) -> list[str]:
        text = str(info).replace("'", '"')
        return await self.functions.heartbeat(
            worker, MODEL, held, lease_s=LEASE_S, info=text, capacity=CAPACITY, **terms
        )

    async def _run_jobs(self, num_long: int, num_ended: int) -> None:
        params = SamplingParams(max_tokens=3 * LONG_TOKENS, seed=1, logprobs=NUM_TOP)
        await self.submit_many(num_long + num_ended, "", URGENT, {"params": params})
        held = await self.claimed(num_long + num_ended, URGENT)
        await self.run(held, LONG_TOKENS)
        self.long, ended = held[:num_long], held[num_long:]
        await self.finish(ended)
        self.ended = [each.job for each in ended]
        self.held = await self.running(512 - num_long)
        await self.follow([*self.long, *self.held])
        await self.submit_many(100, "", URGENT)
        await self.claimed(100, URGENT, CLAIMER)

    async def _post_callbacks(self) -> None:
        """Of ended jobs: due ones of every tenant, those of BIG for a hundred servers; and as many
        letters of BIG as a page holds that are dead."""
        await at_once(self.post(BIG, n % 100) for n in range(400))
        num_dead = 0
        while num_dead < 300:
            for taken in await self.taken():
                await self.outbox.start(taken, lease_s=LEASE_S)
                await self.outbox.done(taken, "dead", note="status 500")
                num_dead += 1
        for job in await self.submit_many(512, callback=self.callback(2)):
            await self.functions.cancel(job.id, job.tenant)

    async def post(self, tenant: str, to: int) -> None:
        """Makes a callback due, for one of the tenant's servers."""
        job = await self.submit(self.job(tenant, "standard"), callback=self.callback(to))
        await self.functions.cancel(job.id, tenant)

    async def taken(self) -> list[Taken]:
        return await self.outbox.take(lease_s=LEASE_S, max_messages=MAX_TAKEN, max_per_target=8)

    async def _keep_files(self) -> None:
        names = [BIG] * 600 + [*TENANTS]
        await at_once(self.add_file(tenant) for tenant in names)
        await at_once(self.add_batch(tenant) for tenant in [BIG] * 90 + [*TENANTS] * 2)

    async def add_file(self, tenant: str, **terms: Any) -> str:
        file_id = new_file_id()
        await self.files.begin(file_id)
        file = StoredFile(
            id=file_id, tenant=tenant, num_bytes=10**6, purpose="batch", filename="lines.jsonl"
        )
        await self.files.add(file, **({"lifetime_s": FOREVER_S, "max_tenant_bytes": 0} | terms))
        return file_id

    async def created_ms(self, job_id: str) -> int:
        return int(await self.client.hget(self.keys.of("job", job_id), "created") or 0)

    async def add_batch(self, tenant: str, start_at_s: float = 0) -> str:
        asked = NewBatch(
            endpoint=Endpoint.CHAT,
            input_file_id=new_file_id(),
            completion_window="24h",
            terms=KeyTerms(tenant=tenant),
            metadata={"run": "nightly"},
            output_lifetime_s=FOREVER_S,
        )
        batch_id = new_batch_id()
        await self.batches.add(batch_id, asked, window_s=FOREVER_S, start_at_s=start_at_s)
        return batch_id

    async def _open_operations(self) -> None:
        for tenant in [BIG] * 12 + [*TENANTS] * 2:
            await self.add_operation(tenant, Wanted(model="another"))

    async def add_operation(
        self, tenant: str, wanted: Wanted, kind: OperationKind = OperationKind.CANCEL
    ) -> str:
        operation_id = new_operation_id()
        await self.operations.add(operation_id, kind, wanted, owner=tenant, tenant=tenant)
        return operation_id
