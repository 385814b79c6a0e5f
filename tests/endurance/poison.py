"""One job that kills engines among many that do not: `python -m tests.endurance.poison --jobs N`.

The poison job must fail as poison; every other job must succeed with the hash model's tokens.
Engines die three times meanwhile, with innocent jobs in the same step.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contract.jobs import Job, JobStatus
from tests.campaigns.command_line import Progress, parser_of, run, silent
from tests.campaigns.pool import Pool, pool
from tests.fakes import HashModelOptions, expected_output

POISON = "\0"  # a byte that the hash model never says
HASH_MODEL = HashModelOptions(crash_id=0, num_blocks=2048)
NUM_WORKERS = 2
AT_A_TIME = 200  # submissions, while others run
MAX_TOKENS = 12


@dataclass
class PoisonReport:
    """Counts. `num_suspected` innocent jobs were suspected with the poison job and ran alone."""

    num_jobs: int
    seed: int
    num_tokens: int = 0
    num_crashes: int = 0
    num_suspected: int = 0
    violations: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "innocent jobs": self.num_jobs,
            "seed": self.seed,
            "tokens": self.num_tokens,
            "engines that died": self.num_crashes,
            "innocent jobs that were suspected": self.num_suspected,
        }


async def run_poison(num_jobs: int, seed: int, say: Callable[[str], None] = silent) -> PoisonReport:
    """Raises TimeoutError if a job does not end, AssertionError if the audit fails."""
    report = PoisonReport(num_jobs, seed)
    place = random.Random(seed).randrange(num_jobs // 4, num_jobs // 2)
    async with pool(HASH_MODEL, num_workers=NUM_WORKERS, num_gateways=0) as found:
        room = asyncio.Semaphore(AT_A_TIME)
        async with asyncio.TaskGroup() as group:
            for number in range(num_jobs):
                if number == place:
                    group.create_task(_check_poison(found, report))
                await room.acquire()
                group.create_task(_check_innocent(found, number, room, report))
                say(f"{number} of {num_jobs} jobs")
        found.audit()
    return report


async def _check_poison(found: Pool, report: PoisonReport) -> None:
    job = await found.caller.submit(POISON, max_tokens=MAX_TOKENS, deadline_s=600)
    [end] = (await found.caller.answer(job, timeout_s=300)).ends
    report.num_crashes = await _num_crashes(found, job)
    if (end.status, end.code) != (JobStatus.FAILED, "poison"):
        report.violations.append(f"the poison ended as {end.status} {end.code}")


async def _check_innocent(
    found: Pool, number: int, room: asyncio.Semaphore, report: PoisonReport
) -> None:
    job = await found.caller.submit(
        f"innocent {number}", max_tokens=MAX_TOKENS, seed=number, temperature=1.0, deadline_s=600
    )
    answer = await found.caller.answer(job, timeout_s=300)
    room.release()
    report.num_tokens += answer.ends[0].output_tokens
    report.num_suspected += await _num_crashes(found, job) > 0
    expected, _ = expected_output(job.prompt_ids, job.params)
    if answer.ends[0].status is not JobStatus.SUCCEEDED or answer.token_ids[0] != expected:
        report.violations.append(f"{job.id}: {answer.ends[0].status}, or other tokens")


async def _num_crashes(found: Pool, job: Job) -> int:
    return int(await found.caller.client.hget(found.caller.keys.of("job", job.id), "crashes") or 0)


def main() -> int:
    parser = parser_of("poison", __doc__)
    parser.add_argument("--jobs", type=int, default=10_000, help="innocent ones (default: 10000)")
    options = parser.parse_args()
    return run(lambda: run_poison(options.jobs, options.seed, Progress().say), options.json)


if __name__ == "__main__":
    sys.exit(main())
