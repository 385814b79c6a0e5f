"""Jobs on real workers, failing receivers, and callbacks processes that are killed.

`scripts/callbacks-campaign --jobs 1000 --kills 50 --json OUT` is the long run; a test does a short
one. Every final message must be delivered at least once, under one id.
"""

import asyncio
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from contract.callbacks import Callback, CallbackKind
from contract.connection import connect
from contract.function_types import Submission
from contract.functions import Functions
from contract.jobs import TERMINAL_STATUSES, Endpoint, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.callbacks_process import CallbacksProcess, callbacks_processes
from tests.callbacks.receiver import SECRET, Answer, Receiver, always, half_of_the_time
from tests.campaigns.command_line import parser_of, run
from tests.fakes import HashModelOptions, encode_text
from tests.fleet import TENANT, fleet, until

PATHS = ("/well", "/half", "/slow", "/down")


@dataclass(frozen=True, slots=True)
class Plan:
    """Size and severity of a campaign."""

    num_jobs: int
    num_kills: int
    down_s: float  # how long `/down` rejects all, from the start
    slow_s: float = 0.5
    num_workers: int = 2
    num_processes: int = 2
    pace_s: float = 0.02  # between two submissions
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """The results. Latencies are seconds from a job's end to the first accepted delivery."""

    num_jobs: int
    num_kills: int
    num_delivered: int
    num_deliveries: int  # accepted ones, with repetitions
    num_attempts: int
    num_forged: int
    num_with_two_ids: int  # jobs delivered under more than one id
    num_dead: int
    p50_well_s: float
    p99_well_s: float
    p50_s: float
    max_s: float

    def figures(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def violations(self) -> list[str]:
        found = []
        if self.num_delivered != self.num_jobs:
            found.append(f"{self.num_jobs - self.num_delivered} ends were not delivered")
        if self.num_with_two_ids:
            found.append(f"{self.num_with_two_ids} ends had more than one id")
        if self.num_forged:
            found.append(f"{self.num_forged} messages could not be verified")
        if self.num_dead:
            found.append(f"{self.num_dead} callbacks were given up")
        return found


async def run_campaign(redis_url: str, plan: Plan) -> Report:
    """Runs the plan on an empty Redis."""
    rng = random.Random(plan.seed)
    client = connect(redis_url, Keys("test"))
    await client.flushall()
    await ensure_library(client)
    keys = Keys("test")
    functions = Functions(client, keys)
    started_s = time.monotonic()
    behaviours = {
        "/well": always(Answer()),
        "/half": half_of_the_time(rng),
        "/slow": always(Answer(delay_s=plan.slow_s)),
        "/down": lambda _: Answer(0 if time.monotonic() - started_s < plan.down_s else 204),
    }
    async with (
        Receiver(behaviours) as receiver,
        fleet(redis_url, plan.num_workers, HashModelOptions()),
        callbacks_processes(redis_url, plan.num_processes) as running,
    ):
        paths: dict[str, str] = {}
        killing = asyncio.create_task(_kill(redis_url, running, plan, rng))
        for number in range(plan.num_jobs):
            path = PATHS[number % len(PATHS)]
            paths[await _submit(functions, receiver.url(path))] = path
            await asyncio.sleep(plan.pace_s)
        await killing
        await receiver.until(lambda: len(_delivered(receiver)) >= plan.num_jobs, 300.0)
        ends = await _ends(functions, list(paths))
        num_dead = int(await client.zcard(keys.of("dead", TENANT)))
    await client.aclose()
    return _report(plan, receiver, paths, ends, num_dead)


async def _kill(
    redis_url: str, running: list[CallbacksProcess], plan: Plan, rng: random.Random
) -> None:
    """Kills one process after another by kill -9, at random moments, and replaces each."""
    every_s = plan.num_jobs * plan.pace_s / max(1, plan.num_kills)
    for _ in range(plan.num_kills):
        await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
        victim = rng.randrange(len(running))
        running[victim].kill()
        running[victim] = CallbacksProcess(redis_url)


async def _submit(functions: Functions, url: str) -> str:
    job = Job(
        id=new_job_id(),
        tenant=TENANT,
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=encode_text("tell me"),
        params=SamplingParams(max_tokens=8, seed=7, temperature=0.0),
        created_s=0,
    )
    callback = Callback(kind=CallbackKind.URL, target=url, secret=SECRET)
    submission = Submission(
        max_output_tokens=8, deadline_s=600, retention_s=3600, callback=callback
    )
    await functions.submit(job, submission)
    return job.id


def _delivered(receiver: Receiver) -> set[str]:
    """Ids of jobs whose final message was accepted."""
    return {
        message.body["data"]["id"]
        for messages in receiver.accepted().values()
        for message in messages
        if message.body["data"]["status"] in TERMINAL_STATUSES
    }


async def _ends(functions: Functions, job_ids: list[str]) -> dict[str, float]:
    """When each job ended: Unix seconds by Redis, whose clock is this machine's."""
    ends: dict[str, float] = {}

    async def all_ended() -> bool:
        for job_id in job_ids:
            found = await functions.read(job_id, TENANT)
            assert found is not None
            if found[0].finished_ms is None:
                return False
            assert found[0].status is JobStatus.SUCCEEDED
            ends[job_id] = found[0].finished_ms / 1000
        return True

    await until(all_ended)
    return ends


def _report(
    plan: Plan,
    receiver: Receiver,
    paths: dict[str, str],
    ends: dict[str, float],
    num_dead: int,
) -> Report:
    ids: dict[str, set[str]] = {}
    first_s: dict[str, float] = {}
    for message in receiver.messages:
        job_id = message.body["data"]["id"]
        ids.setdefault(job_id, set()).add(message.id)
        if message.was_accepted:
            first_s.setdefault(job_id, message.at_s)
    latencies = {job_id: at_s - ends[job_id] for job_id, at_s in first_s.items()}
    well = sorted(s for job_id, s in latencies.items() if paths[job_id] == "/well")
    return Report(
        num_jobs=plan.num_jobs,
        num_kills=plan.num_kills,
        num_delivered=len(first_s),
        num_deliveries=sum(message.was_accepted for message in receiver.messages),
        num_attempts=len(receiver.messages),
        num_forged=len(receiver.forged),
        num_with_two_ids=sum(len(seen) > 1 for seen in ids.values()),
        num_dead=num_dead,
        p50_well_s=round(statistics.median(well), 3),
        p99_well_s=round(well[int(0.99 * (len(well) - 1))], 3),
        p50_s=round(statistics.median(latencies.values()), 3),
        max_s=round(max(latencies.values()), 3),
    )


def main() -> int:
    parser = parser_of("callbacks-campaign", "Callbacks under failures, see docs/reliability.md.")
    parser.add_argument("--jobs", type=int, default=1000, help="(default: 1000)")
    parser.add_argument("--kills", type=int, default=50, help="kill -9 (default: 50)")
    parser.add_argument("--down-s", type=float, default=60.0, help="(default: 60 s)")
    parser.add_argument("--pace-s", type=float, default=0.2, help="between jobs (default: 0.2 s)")
    given = parser.parse_args()
    plan = Plan(given.jobs, given.kills, given.down_s, pace_s=given.pace_s, seed=given.seed)
    with EmbeddedRedis() as server:
        return run(lambda: run_campaign(server.url, plan), given.json)


if __name__ == "__main__":
    sys.exit(main())
