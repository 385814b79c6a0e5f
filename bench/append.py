"""Measures the cost of logging a step: python -m bench.append

One call of `append` writes a token of each running job, as a supervisor does once per step; one
call in ten also renews leases. Uses one connection over a Unix socket to a private server. Also
reports the function's own time (`INFO commandstats`).
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis.asyncio

from bench.submit import make_job
from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission
from contract.functions import Functions
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from infra.tables import percentile

NUM_JOBS = (1, 32, 64, 128, 256)
_TERMS = Submission(max_output_tokens=100_000, deadline_s=600, retention_s=60)
_NUM_WARM_UP = 5  # calls
_LEASE_S = 600
_RENEWED_CALLS = 10  # calls between lease renewals: half a second of a worker's steps


@dataclass(frozen=True, slots=True)
class Figures:
    """For steps of `num_jobs` jobs. Milliseconds; `function_ms` is the mean inside Redis."""

    num_jobs: int
    p50_ms: float
    p99_ms: float
    function_ms: float


async def measure(num_jobs: int, num_calls: int) -> Figures:
    """Submits and claims jobs of several tenants; each then gets a token per call."""
    with EmbeddedRedis() as server:
        async with contextlib.aclosing(connect(server.url, command_timeout_s=None)) as client:
            await ensure_library(client)
            functions = Functions(client, Keys("bench"))
            claimed = await _claim(functions, num_jobs)
            for number in range(1, _NUM_WARM_UP + 1):
                await functions.append("w", step_of(claimed, number), lease_s=_LEASE_S)
            return await _measure(client, functions, claimed, num_calls)


def step_of(claimed: Sequence[Claimed], number: int) -> list[Append]:
    """A token for each job, in event `number` (from 1)."""
    event = Tokens((ChoiceDelta(0, number - 1, (97,), "a"),))
    return [Append(c.job.id, c.epoch, number, event, 1) for c in claimed]


async def _claim(functions: Functions, num_jobs: int) -> list[Claimed]:
    for index in range(num_jobs):
        await functions.submit(make_job(index), _TERMS)
    claimed: list[Claimed] = []
    while len(claimed) < num_jobs:
        claimed += await functions.claim(
            "w", "m", ["standard"], lease_s=_LEASE_S, max_jobs=64, max_tokens=10**9
        )
    return claimed


async def _measure(
    client: redis.asyncio.Redis, functions: Functions, claimed: list[Claimed], num_calls: int
) -> Figures:
    await client.config_resetstat()
    walls_ms = []
    for number in range(_NUM_WARM_UP + 1, _NUM_WARM_UP + 1 + num_calls):
        items = step_of(claimed, number)
        started_s = time.perf_counter()
        lease_s = 0 if number % _RENEWED_CALLS else _LEASE_S
        verdicts = await functions.append("w", items, lease_s=lease_s)
        walls_ms.append(1000 * (time.perf_counter() - started_s))
        assert all(next_number == number + 1 for _, next_number in verdicts)
    stats: Any = await client.info("commandstats")
    p50_ms, p99_ms = (percentile(walls_ms, share) or 0.0 for share in (0.5, 0.99))
    function_ms = stats["cmdstat_fcall"]["usec_per_call"] / 1000
    return Figures(len(claimed), p50_ms, p99_ms, function_ms)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.append", description=__doc__)
    parser.add_argument("--calls", type=int, default=300, help="timed for each row")
    parser.add_argument("--jobs", type=int, nargs="+", default=NUM_JOBS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(argv)
    print("| jobs in a step | append p50 (ms) | p99 (ms) | in Redis, mean (ms) |")
    print("|---|---|---|---|")
    found = []
    for num_jobs in options.jobs:
        f = asyncio.run(measure(num_jobs, options.calls))
        found.append(f)
        print(f"| {num_jobs} | {f.p50_ms:.2f} | {f.p99_ms:.2f} | {f.function_ms:.2f} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(f) for f in found]) + "\n")


if __name__ == "__main__":
    main()
