"""SIGTERMs under load, one after another: `python -m tests.endurance.drains --count N`.

Workers are drained one after another while they run jobs. Each must exit with status 0 and hold
nothing. Each job must end exactly once with the hash model's tokens, as if it had been tried once:
no crash, expired lease or attempt is counted against it.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from contract.jobs import Job, JobStatus
from tests.campaigns.command_line import Progress, parser_of, run, silent
from tests.campaigns.load import side_by_side
from tests.campaigns.pool import Pool, pool
from tests.fakes import HashModelOptions, expected_output, output_text
from tests.fleet import WorkerProcess

HASH_MODEL = HashModelOptions(step_s=0.02, eos_rate=0.0, num_blocks=512)
# How far a worker on a busy machine may exceed its budget before it counts as a violation. The
# longest exit is reported in any case.
LATE_S = 5.0
LEASE_S = 10.0  # none expires
NUM_WORKERS = 3
NUM_JOBS = 24  # at a time
LONGEST_JOB = 2.0  # budgets that the longest job runs for
REPEATED_SHARE = 0.25  # of the workers, which get the signal three times


@dataclass
class DrainReport:
    """Seconds and counts. `num_moved` jobs were released and resumed by another worker."""

    seed: int
    budget_s: float
    num_drains: int = 0
    num_jobs: int = 0
    num_tokens: int = 0
    num_moved: int = 0
    num_releases: int = 0
    num_held: int = 0  # jobs held by workers when their drains began
    exits_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "SIGTERMs": self.num_drains,
            "seed": self.seed,
            "jobs": self.num_jobs,
            "tokens": self.num_tokens,
            "jobs held at a SIGTERM, in all": self.num_held,
            "jobs that moved": self.num_moved,
            "moves": self.num_releases,
            "budget (s)": self.budget_s,
            "longest exit (s)": round(max(self.exits_s, default=0.0), 2),
            "exits over budget": sum(exit_s > self.budget_s for exit_s in self.exits_s),
        }


async def run_drains(
    count: int, seed: int, budget_s: float, say: Callable[[str], None] = silent
) -> DrainReport:
    """Raises TimeoutError if a job does not end."""
    report = DrainReport(seed, budget_s)
    settings: dict[str, Any] = {"drain_s": budget_s, "lease_s": LEASE_S}
    async with pool(HASH_MODEL, num_workers=NUM_WORKERS, num_gateways=0, **settings) as found:
        is_over = asyncio.Event()
        numbers = itertools.count()
        callers = [_run_jobs(found, numbers, is_over, report) for _ in range(NUM_JOBS)]
        await side_by_side(_drain_workers(found, count, is_over, report, say), *callers)
        report.violations += found.audit()
    return report


# --- the load ---------------------------------------------------------------------------------


async def _run_jobs(
    found: Pool, numbers: Iterator[int], is_over: asyncio.Event, report: DrainReport
) -> None:
    """Runs one job after another until the last drain."""
    longest_tokens = int(LONGEST_JOB * report.budget_s / HASH_MODEL.step_s)
    while not is_over.is_set():
        number = next(numbers)
        rng = random.Random(f"{report.seed} job {number}")
        job = await found.caller.submit(
            f"job {number}",
            max_tokens=rng.randrange(10, longest_tokens),
            n=rng.choice((1, 1, 2)),
            temperature=float(rng.randrange(2)),
            seed=number,
        )
        await _check(found, job, report)


async def _check(found: Pool, job: Job, report: DrainReport) -> None:
    answer = await found.caller.answer(job, timeout_s=120)
    report.num_jobs += 1
    report.num_tokens += answer.ends[0].output_tokens
    if answer.ends[0].status is not JobStatus.SUCCEEDED:
        report.violations.append(f"{job.id}: {answer.ends[0].status}")
        return
    for choice in range(job.params.n):
        expected, _ = expected_output(job.prompt_ids, job.params, choice=choice, eos_rate=0.0)
        is_same = answer.token_ids[choice] == expected
        if not is_same or answer.text[choice] != output_text(expected):
            report.violations.append(f"{job.id}: choice {choice} says something else")
    names = ("attempt", "crashes", "lapses", "releases", "epoch")
    raw: Any = await found.caller.client.hmget(found.caller.keys.of("job", job.id), names)
    attempt, crashes, lapses, releases, epoch = map(int, raw)
    report.num_moved += releases > 0
    report.num_releases += releases
    if (attempt, crashes, lapses, epoch) != (1, 0, 0, releases + 1):
        counted = f"attempt={attempt} crashes={crashes} lapses={lapses} epoch={epoch}"
        report.violations.append(f"{job.id}: {counted} after {releases} releases")


# --- the disturbance --------------------------------------------------------------------------


async def _drain_workers(
    found: Pool,
    count: int,
    is_over: asyncio.Event,
    report: DrainReport,
    say: Callable[[str], None],
) -> None:
    """Drains the oldest worker while another replaces it."""
    rng = random.Random(f"{report.seed} drains")
    for _ in range(count):
        settings: dict[str, Any] = {"drain_s": report.budget_s, "lease_s": LEASE_S}
        found.workers.append(WorkerProcess(found.server.url, HASH_MODEL, **settings))
        await asyncio.sleep(rng.random())
        await _drain(found, found.workers[0], rng.random() < REPEATED_SHARE, report)
        del found.workers[0]
        await found.caller.num_workers(NUM_WORKERS)
        report.num_drains += 1
        say(f"{report.num_drains} of {count} SIGTERMs, {report.num_jobs} jobs")
    is_over.set()


async def _drain(
    found: Pool, worker: WorkerProcess, is_repeated: bool, report: DrainReport
) -> None:
    report.num_held += await _num_held(found, worker.pid)
    started_s = time.monotonic()
    for _ in range(2 if is_repeated else 0):
        worker.terminate()
    status = await worker.stop(timeout_s=60)
    report.exits_s.append(time.monotonic() - started_s)
    if status != 0:
        report.violations.append(f"a worker ended with status {status}")
    if report.exits_s[-1] > report.budget_s + LATE_S:
        report.violations.append(f"a worker took {report.exits_s[-1]:.1f} s to end")
    if await _num_held(found, worker.pid):
        report.violations.append("a worker has ended and holds jobs")


async def _num_held(found: Pool, pid: int) -> int:
    """The number of jobs that a worker holds in Redis. Its incarnation contains its process id."""
    client, keys = found.caller.client, found.caller.keys
    found_keys: Any = await client.keys(f"{keys.of('own', '')}*-{pid}-*")
    sizes: list[int] = [await client.scard(key) for key in found_keys]
    return sum(sizes)


def main() -> int:
    parser = parser_of("drains", __doc__)
    parser.add_argument("--count", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--budget-s", type=float, default=3.0, help="to end in (default: 3)")
    options = parser.parse_args()
    given = (options.count, options.seed, options.budget_s)
    return run(lambda: run_drains(*given, Progress().say), options.json)


if __name__ == "__main__":
    sys.exit(main())
