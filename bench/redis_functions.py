"""Measures functions of the Redis library: python -m bench.redis_functions append|submit

append: logs a token of each running job, as a supervisor does once per step; one call in ten also
renews leases. submit: queues a job while others wait, with every limit set and none reached; then
reads it. Uses one connection over a Unix socket to a private server. Reports the whole call
(encoding, round trip, function) and the function's own time (`INFO commandstats`).
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import redis.asyncio

from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission, TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams, new_job_id
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from infra.tables import markdown_table, percentile, write

NUM_JOBS = {"append": (1, 32, 64, 128, 256), "submit": (0, 1_000, 10_000, 100_000)}
NUM_TENANTS = 20
LANES = ("interactive", "standard", "batch", "scoring")
_LIMITS = TenantLimits(
    requests_per_min=10**9, tokens_per_min=10**12, concurrent_tokens=10**12, lane_share=1.0
)
_TERMS = Submission(
    10_000,  # tokens of output
    deadline_s=10**7,
    retention_s=600,
    lane_bound_tokens=10**12,
    lane_bound_s=10**7,
    limits=_LIMITS,
)
_NUM_WARM_UP = 5  # calls
_LEASE_S = 600
_RENEWED_CALLS = 10  # calls between lease renewals: half a second of a worker's steps


@dataclass(frozen=True, slots=True)
class Figures:
    """A function's times in milliseconds, with `num_jobs` jobs in a step or in the queue.
    `function_ms` is the mean inside Redis."""

    function: str
    num_jobs: int
    p50_ms: float
    p99_ms: float
    function_ms: float


def make_job(index: int, num_prompt: int = 200) -> Job:
    return Job(
        id=new_job_id(),
        tenant=f"tenant-{index % NUM_TENANTS}",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(range(num_prompt)),
        params=SamplingParams(max_tokens=256, seed=0),
        created_s=0,
    )


def step_of(claimed: Sequence[Claimed], number: int) -> list[Append]:
    """Returns a token for each job, in event `number` (from 1)."""
    event = Tokens((ChoiceDelta(0, number - 1, (97,), "a"),))
    return [Append(c.job.id, c.epoch, number, event, 1) for c in claimed]


async def measure_append(num_jobs: Sequence[int], num_calls: int) -> list[Figures]:
    """Submits and claims jobs of several tenants; each then gets a token per call."""
    figures = []
    for num in num_jobs:
        async with _server() as (client, functions):
            await _submit(functions, range(num))
            claimed: list[Claimed] = []
            while len(claimed) < num:
                claimed += await functions.claim(
                    "w", "m", ["standard"], lease_s=_LEASE_S, max_jobs=64, max_tokens=10**9
                )
            append = partial(_append, functions, claimed)
            for number in range(1, _NUM_WARM_UP + 1):
                await append(number)
            numbers = range(_NUM_WARM_UP + 1, _NUM_WARM_UP + 1 + num_calls)
            figures.append(await _time(client, "append", num, append, numbers))
    return figures


async def _append(functions: Functions, claimed: list[Claimed], number: int) -> None:
    lease_s = 0 if number % _RENEWED_CALLS else _LEASE_S
    verdicts = await functions.append("w", step_of(claimed, number), lease_s=lease_s)
    assert all(next_number == number + 1 for _, next_number in verdicts)


async def measure_submit(num_jobs: Sequence[int], num_calls: int) -> list[Figures]:
    """Fills the queue to each length; then submits jobs and reads them."""
    figures = []
    async with _server() as (client, functions):
        capacity = WorkerCapacity(5_000.0, 50.0, 100_000, 256, LANES)
        await functions.heartbeat("w", "m", [], lease_s=600, info="{}", capacity=capacity)
        num_queued = 0
        for num in num_jobs:
            await _submit(functions, range(num_queued, num))
            jobs = [make_job(index) for index in range(num_calls)]
            for name, call in (
                ("submit", lambda job: functions.submit(job, _TERMS)),
                ("read", lambda job: functions.read(job.id, job.tenant)),
            ):
                figures.append(await _time(client, name, num, call, jobs))
            num_queued = num + num_calls
    return figures


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[tuple[redis.asyncio.Redis, Functions]]:
    with EmbeddedRedis() as server:
        async with connect(server.url, command_timeout_s=None) as client:
            await ensure_library(client)
            yield client, Functions(client, Keys("bench"))


async def _submit(functions: Functions, indices: Iterable[int]) -> None:
    for index in indices:
        await functions.submit(make_job(index), _TERMS)


async def _time(
    client: redis.asyncio.Redis,
    name: str,
    num_jobs: int,
    call: Callable[[Any], Awaitable[object]],
    arguments: Iterable[Any],
) -> Figures:
    """Times a call with each argument."""
    await client.config_resetstat()
    walls_ms = []
    for argument in arguments:
        started_s = time.perf_counter()
        await call(argument)
        walls_ms.append(1000 * (time.perf_counter() - started_s))
    stats: Any = await client.info("commandstats")
    [used] = [found for command, found in stats.items() if command.startswith("cmdstat_fcall")]
    p50_ms, p99_ms = (percentile(walls_ms, share) or 0.0 for share in (0.5, 0.99))
    return Figures(name, num_jobs, p50_ms, p99_ms, used["usec_per_call"] / 1000)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.redis_functions", description=__doc__)
    parser.add_argument("function", choices=NUM_JOBS)
    parser.add_argument("--calls", type=int, default=1_000, help="timed for each row")
    parser.add_argument("--jobs", type=int, nargs="+", metavar="N", help="in a step, or queued")
    parser.add_argument("--json", metavar="OUT")
    options = parser.parse_args(argv)
    measure = measure_append if options.function == "append" else measure_submit
    found = asyncio.run(measure(options.jobs or NUM_JOBS[options.function], options.calls))
    rows = [["function", "jobs", "p50 (ms)", "p99 (ms)", "in Redis, mean (ms)"]]
    rows += [
        [
            f.function,
            f"{f.num_jobs:,}",
            *(f"{ms:.3f}" for ms in (f.p50_ms, f.p99_ms, f.function_ms)),
        ]
        for f in found
    ]
    write([asdict(f) for f in found], markdown_table(rows), options.json)


if __name__ == "__main__":
    main()
