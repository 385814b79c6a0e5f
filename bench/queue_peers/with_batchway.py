"""One action on batchway's functions: python -m bench.queue_peers.with_batchway SOCKET ACTION
CLIENTS JOBS; prints the seconds.

A job is submitted with the bounds and limits that a gateway sends, claimed with a lease, and ended
with a log entry. `finish16` claims and ends up to 16 jobs in a call, as a worker does.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

from msgspec.structs import replace

from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Submission, TenantLimits
from contract.functions import Functions
from contract.jobs import Endpoint, FinishReason, Job, JobStatus, SamplingParams
from contract.keys import Keys, new_job_id
from contract.library import ensure_library
from contract.roster import Roster

MODEL, LANE, LEASE_S = "m", "standard", 60.0
TERMS = Submission(
    max_output_tokens=256,
    deadline_s=600.0,
    retention_s=600.0,
    lane_bound_tokens=2**40,
    lane_bound_s=1e9,
    limits=TenantLimits(requests_per_min=10**9, tokens_per_min=10**12, concurrent_tokens=10**12),
    attendance_s=300.0,
)


def make_job(number: int) -> Job:
    """600 bytes of prompt, for one of 20 tenants."""
    return Job(
        id=new_job_id(),
        tenant=f"tenant-{number % 20}",
        model=MODEL,
        lane=LANE,
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(range(1000, 1200)),
        params=SamplingParams(max_tokens=256, seed=1),
        created_s=0,
    )


class Actions:
    def __init__(self, functions: Functions, path: str, num_clients: int, num_jobs: int) -> None:
        self.functions = functions
        self.path = path
        self.num_clients = num_clients
        self.numbers = iter(range(num_jobs))
        self.num_jobs = num_jobs

    async def shared(self, call: Callable[[int], Awaitable[object]]) -> None:
        async def one() -> None:
            for number in self.numbers:
                await call(number)

        await asyncio.gather(*(one() for _ in range(self.num_clients)))

    async def enqueue(self) -> None:
        await self.shared(lambda number: self.functions.submit(make_job(number), TERMS))

    async def finish(self, at_once: int = 1) -> None:
        await asyncio.gather(
            *(self._work(f"w{index}", at_once) for index in range(self.num_clients))
        )

    async def finish16(self) -> None:
        await self.finish(16)

    async def _work(self, name: str, at_once: int) -> None:
        claim = partial(self.functions.claim, lease_s=LEASE_S, max_tokens=2**40)
        while numbers := [*islice(self.numbers, at_once)]:
            claimed = await claim(name, MODEL, (LANE,), max_jobs=len(numbers))
            items = [
                Append(
                    one.job.id,
                    one.epoch,
                    1,
                    Tokens((ChoiceDelta(0, 0, (7, 8), "done", FinishReason.STOP),)),
                    2,
                    JobStatus.SUCCEEDED,
                )
                for one in claimed
            ]
            await self.functions.append(name, items, lease_s=LEASE_S)

    async def append(self) -> None:
        """One worker appends a token to one job per client in each call; a follower of the last job
        hears of each."""
        jobs = [make_job(number) for number in range(self.num_clients)]
        for job in jobs:
            await self.functions.submit(job, replace(TERMS, max_output_tokens=self.num_jobs))
        claim = partial(self.functions.claim, lease_s=LEASE_S, max_tokens=2**40)
        claimed = await claim("w", MODEL, (LANE,), max_jobs=len(jobs))
        client = connect(f"unix://{self.path}", Keys())
        async with client.pubsub(ignore_subscribe_messages=True) as heard:
            await heard.subscribe(Keys().of("ev", claimed[-1].job.id))
            await heard.get_message(timeout=5)  # of the subscription
            for number in range(1, 1 + self.num_jobs // self.num_clients):
                event = Tokens((ChoiceDelta(0, number - 1, (7,), "token "),))
                items = [Append(one.job.id, one.epoch, number, event, 1) for one in claimed]
                await self.functions.append("w", items, lease_s=LEASE_S)
                assert await heard.get_message(timeout=5), "no hint"
        await client.aclose()


async def main(path: str, action: str, num_clients: str, num_jobs: str) -> None:
    async with connect(f"unix://{path}", Keys()) as client:
        await ensure_library(client)
        functions = Functions(client, Keys())
        for index in range(int(num_clients)):
            roster = Roster(client, Keys())
            await roster.heartbeat(f"w{index}", MODEL, [], lease_s=LEASE_S, info="{}")
        actions = Actions(functions, path, int(num_clients), int(num_jobs))
        start_s = time.perf_counter()
        await getattr(actions, action)()
        print(time.perf_counter() - start_s)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
