"""Sends mutated bodies to a gateway with a worker of the hash model and Redis, all processes.

First every unchanged body must be accepted. More than half of the mutated ones must be queued;
the others must get a proper error. No process may die, no job stay open, no log contain a
prompt.
"""

import asyncio
import contextlib
import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from contract.connection import end_tasks
from contract.functions import Functions
from contract.jobs import DEFAULT_LANES
from tests.campaigns.command_line import silent
from tests.campaigns.pool import Pool, pool
from tests.fakes import HashModelOptions
from tests.fleet import until
from tests.gateway.conftest import until_listed
from tests.gateway.fake_worker import FakeWorker, publish_model
from tests.gateway.mutations.drawing import Request, draw, request_of
from tests.gateway.mutations.judge import FAULTS, Announced, code_of, job_id_of, judge
from tests.gateway.mutations.seeds import CANARY, CHANGE, COMPLETIONS, MODEL, SEEDS
from tests.gateway.vector_worker import CARDS, publish_vector_model, vector_worker
from tests.infra.processes import descendants

_HASH_MODEL = HashModelOptions(num_blocks=512, max_model_len=256, eos_rate=0.25)
_IDLE_MODEL = "idle"  # has no worker: its jobs wait until they are cancelled
_NUM_CALLERS = 16
_LOOKED_AT = 20  # one in so many jobs is read with its result
_MOST_VIOLATIONS = 100
_END_TIMEOUT_S = 120.0


@dataclass
class MutationsReport:
    """`num_accepted` counts answers below 400, `num_queued` those that created a job."""

    num_bodies: int
    seed: int
    num_accepted: int = 0
    num_queued: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    processor_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "bodies": self.num_bodies,
            "seed": self.seed,
            "accepted": f"{self.num_accepted / self.num_bodies:.1%}",
            "reached the queue": f"{self.num_queued / self.num_bodies:.1%}",
            "answers": dict(sorted(self.answers.items())),
            "ends of jobs": dict(sorted(self.ends.items())),
            "processor_s": round(self.processor_s, 1),
        }

    def blame(self, what: str) -> None:
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(what)


@dataclass
class _Run:
    found: Pool
    http: httpx.AsyncClient
    announced: Announced
    report: MutationsReport
    job_ids: set[str] = field(default_factory=set)  # of all that reached the queue
    waiting: list[str] = field(default_factory=list)  # of jobs that changes are tried on

    async def ask(self, request: Request) -> httpx.Response:
        path = request.path
        if path == CHANGE:
            path = path.format(job_id=await self._waiting_job())
        url = f"{path}?{request.query}" if request.query else path
        return await self.http.request(
            request.method, url, content=request.body, headers=list(request.headers)
        )

    async def check(self, number: int, request: Request) -> None:
        """Sends a request, judges the answer and counts it."""
        report = self.report
        try:
            answer = await self.ask(request)
        except httpx.HTTPError as exc:
            report.answers["none"] += 1
            report.blame(f"{number}: {type(exc).__name__} ({request.name}): {_shown(request)}")
            return
        report.answers[code_of(answer)] += 1
        report.num_accepted += answer.status_code < 400
        if job_id := job_id_of(answer):
            report.num_queued += 1
            self.job_ids.add(job_id)
        for wrong in judge(request, answer, self.announced):
            report.blame(f"{number}: {wrong} ({request.name}): {_shown(request)}")

    async def seed(self) -> None:
        """Sends every unchanged body. Raises AssertionError if one is rejected."""
        for number, seed in enumerate(SEEDS, self.report.num_bodies):
            request = request_of(seed, number)
            answer = await self.ask(request)
            assert answer.status_code < 400, (seed.name, answer.text)
            wrong = list(judge(request, answer, self.announced))
            assert not wrong, (seed.name, wrong)
            self.job_ids |= {job_id_of(answer)} - {""}

    async def mutations(self, say: Callable[[str], None]) -> None:
        numbers = iter(range(self.report.num_bodies))

        async def caller() -> None:
            for number in numbers:
                rng = random.Random(f"{self.report.seed}-{number}")
                await self.check(number, draw(rng, number))
                say(f"{number} of {self.report.num_bodies} bodies")

        async with asyncio.TaskGroup() as group:
            for _ in range(_NUM_CALLERS):
                group.create_task(caller())

    async def end(self) -> None:
        """Checks that each job ends and can be read, that the audit of Redis passes, and that
        the processes still run."""
        for job_id in self.waiting:
            answer = await self.http.post(f"/v1/jobs/{job_id}/cancel")
            if answer.status_code not in (200, 409):  # it may have met its deadline
                self.report.blame(f"a cancel is answered with {answer.status_code}")
        caller = self.found.caller

        async def is_over() -> bool:
            return not await caller.client.zcard(caller.keys.of("deadlines"))

        await until(is_over, _END_TIMEOUT_S)
        await self.found.until_at_rest()
        self.report.violations += await asyncio.to_thread(self.found.audit)
        listed = await self._listed()
        if lost := self.job_ids - listed:
            self.report.blame(f"{len(lost)} jobs are not listed: {sorted(lost)[:3]}")
        for job_id in sorted(self.job_ids)[::_LOOKED_AT]:
            answer = await self.http.get(f"/v1/jobs/{job_id}")
            if answer.status_code != 200:
                self.report.blame(f"GET {job_id}: {answer.status_code}")
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        if (answer := await self.http.post(COMPLETIONS, json=body)).status_code != 200:
            self.report.blame(f"an ordinary call is answered with {answer.text}")

    async def _listed(self) -> set[str]:
        """Lists all jobs, page by page, and counts how they ended."""
        ids: set[str] = set()
        after: dict[str, str] = {}
        while True:
            answer = await self.http.get("/v1/jobs", params={"limit": 100, **after})
            if answer.status_code != 200:
                self.report.blame(f"the list of jobs: {answer.text}")
                return ids
            page = answer.json()
            for job in page["data"]:
                ids.add(job["id"])
                code = (job["error"] or {}).get("code", "")
                self.report.ends[f"{job['status']} {code}".strip()] += 1
                if code in FAULTS:
                    self.report.blame(f"{job['id']} ended as {job['status']}: {code}")
            if not page["has_more"]:
                return ids
            after = {"after": page["last_id"]}

    async def _waiting_job(self) -> str:
        """A job that no worker claims."""
        job = {"endpoint": COMPLETIONS, "body": {"model": _IDLE_MODEL, "prompt": "canary-idle"}}
        answer = await self.http.post("/v1/jobs", json=job)
        self.waiting.append(answer.json()["id"])
        return self.waiting[-1]


def _shown(request: Request) -> str:
    """The command that repeats a request."""
    headers = [f"{name!r}: {value[:40]!r}" for name, value in request.headers[1:]]
    return f"{request.query[:80]} {headers} {request.body[:600]!r}"


@contextlib.asynccontextmanager
async def _running(report: MutationsReport) -> AsyncIterator[_Run]:
    """Runs all parts. At exit, checks that their processes are the same and searches their logs."""
    with tempfile.TemporaryFile() as output:
        async with pool(_HASH_MODEL, num_workers=1, output=output) as found:
            before = await _processes(found)
            async with httpx.AsyncClient(base_url=found.url, timeout=60) as http:
                await _publish_models(found, http)
                serving = _serve_vectors(found)
                yield _Run(found, http, await Announced.read(http), report)
                await end_tasks(*serving)
            if await _processes(found) != before:
                report.blame("the worker or Redis has died")
        output.seek(0)
        _search(output.read().decode(errors="replace").lower(), report)


async def _publish_models(found: Pool, http: httpx.AsyncClient) -> None:
    """Publishes a model without a worker, and the prefill-only ones; returns once the gateway knows
    them."""
    caller = found.caller
    for name in CARDS:
        await publish_vector_model(caller.client, caller.keys, name)
    await publish_model(caller.client, caller.keys, _IDLE_MODEL, lanes=DEFAULT_LANES)

    await until_listed(http, {_IDLE_MODEL})


def _serve_vectors(found: Pool) -> list[asyncio.Task[None]]:
    """Starts fake workers of the prefill-only models, in this process. Not in a task group, which
    passes a cancellation on once only: redis-py may lose it (contract.connection.end_tasks)."""
    caller = found.caller
    functions = Functions(caller.client, caller.keys)
    workers = [vector_worker(functions, name) for name in CARDS]

    async def beat(worker: FakeWorker) -> None:
        while True:
            await worker.beat()
            await asyncio.sleep(1.0)

    return [asyncio.create_task(work) for each in workers for work in (beat(each), each.serve())]


async def _processes(found: Pool) -> tuple[str, list[int]]:
    """Process ids of Redis and the worker. They change if one dies, even if it is restarted."""
    info: Any = await found.caller.client.info("server")
    return info["run_id"], [pid for worker in found.workers for pid in descendants(worker.pid)]


def _search(text: str, report: MutationsReport) -> None:
    """Searches the logs of all parts, ignoring case."""
    if "accepted job_id=" not in text or "workers." not in text:
        report.blame("the log does not hold what is always logged")
    for word in (CANARY.strip("-"), "traceback", "unexpected", " error "):
        if lines := [line for line in text.splitlines() if word in line]:
            report.blame(f"the log holds {word!r} {len(lines)} times: {lines[0][:300]}")


async def run_mutations(
    num_bodies: int, seed: int, say: Callable[[str], None] = silent
) -> MutationsReport:
    """Raises AssertionError if an unchanged body is rejected, TimeoutError if a job does not
    end."""
    report = MutationsReport(num_bodies, seed)
    before = os.times()
    async with _running(report) as running:
        await running.seed()
        await running.mutations(say)
        say("all are answered; waiting for the ends of jobs")
        await running.end()
    after = os.times()
    report.processor_s = sum(after[:4]) - sum(before[:4])
    if report.num_queued * 2 <= num_bodies:
        report.blame(f"only {report.num_queued} of {num_bodies} bodies reached the queue")
    return report
