"""Measures `submit` with growing queues: python -m bench.submit

Uses one connection over a Unix socket to a private Redis. Reports the whole call (encoding, round
trip, function) and the function's own time (`INFO commandstats`).
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from contract.connection import connect
from contract.function_types import Submission, TenantLimits, WorkerCapacity
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams, new_job_id
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis

QUEUED = (0, 1_000, 10_000, 100_000)
NUM_TENANTS = 20
LANES = ("interactive", "standard", "batch", "scoring")
_LIMITS = TenantLimits(
    requests_per_min=10**9, tokens_per_min=10**12, concurrent_tokens=10**12, lane_share=1.0
)
_TERMS = Submission(
    256,
    deadline_s=10**7,
    retention_s=600,
    lane_bound_tokens=10**12,
    lane_bound_s=10**7,
    limits=_LIMITS,
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One queue length. Milliseconds; `function_ms` is the mean inside Redis."""

    num_queued: int
    submit_p50_ms: float
    submit_p99_ms: float
    function_ms: float
    read_p50_ms: float


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


async def measure(num_calls: int, queued: tuple[int, ...] = QUEUED) -> list[Figures]:
    """Sets all limits, so that each is checked, but none is reached."""
    figures = []
    with EmbeddedRedis() as server:
        async with contextlib.aclosing(connect(server.url, command_timeout_s=None)) as client:
            await ensure_library(client)
            functions = Functions(client, Keys("bench"))
            capacity = WorkerCapacity(5_000.0, 50.0, 100_000, 256, LANES)
            await functions.heartbeat("w", "m", [], lease_s=600, info="{}", capacity=capacity)
            num_queued = 0
            for target in queued:
                await _fill(functions, num_queued, target)
                figures.append(await _measure_at(client, functions, target, num_calls))
                num_queued = target + num_calls
    return figures


async def _fill(functions: Functions, start: int, stop: int) -> None:
    for index in range(start, stop):
        await functions.submit(make_job(index), _TERMS)


async def _measure_at(
    client: redis.asyncio.Redis, functions: Functions, num_queued: int, num_calls: int
) -> Figures:
    jobs = [make_job(index) for index in range(num_calls)]
    await client.config_resetstat()
    submits, reads = [], []
    for job in jobs:
        started_s = time.perf_counter()
        await functions.submit(job, _TERMS)
        submits.append(1000 * (time.perf_counter() - started_s))
    stats: Any = await client.info("commandstats")
    for job in jobs:
        started_s = time.perf_counter()
        await functions.read(job.id, job.tenant)
        reads.append(1000 * (time.perf_counter() - started_s))
    return Figures(
        num_queued,
        statistics.median(submits),
        statistics.quantiles(submits, n=100)[98],
        stats["cmdstat_fcall"]["usec_per_call"] / 1000,
        statistics.median(reads),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.submit", description=__doc__)
    parser.add_argument("--calls", type=int, default=2_000, help="measured at each length")
    options = parser.parse_args()
    print("| jobs queued | submit p50 (ms) | p99 (ms) | in Redis, mean (ms) | read p50 (ms) |")
    print("|---|---|---|---|---|")
    for f in asyncio.run(measure(options.calls)):
        print(
            f"| {f.num_queued:,} | {f.submit_p50_ms:.3f} | {f.submit_p99_ms:.3f} "
            f"| {f.function_ms:.3f} | {f.read_p50_ms:.3f} |"
        )


if __name__ == "__main__":
    main()
