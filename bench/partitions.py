"""Submissions and appends with 1, 2 and 4 partitions, each on a server of its own:
python -m bench.partitions

One client process drives all servers, as a gateway and a worker do. `function µs` is the time of
the function itself, `server µs` the processor time of the servers for a call with all that is
around it: a server that waits more often wakes up more often for the same calls. `calls/s of a
server` is what one could do with a core of its own.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from bench.tables import markdown_table
from contract.connection import connect
from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, Submission
from contract.functions import Functions
from contract.jobs import Endpoint, Job, SamplingParams
from contract.keys import Keys, new_job_id
from contract.library import ensure_library
from contract.partitions import partition_of_tenant
from infra.embedded_redis import EmbeddedRedis

NUM_JOBS = 2_000  # of each run
NUM_APPENDS = 500  # of steps, each with as many jobs as a worker runs
NUM_STREAMS = 64
_TERMS = {"lease_s": 3600.0, "max_jobs": NUM_STREAMS, "max_tokens": 2**40}


class Fleet:
    """Partitions on servers of their own."""

    def __init__(self, servers: list[EmbeddedRedis]) -> None:
        self.keys = [Keys("bench", number) for number in range(len(servers))]
        self.clients = [
            connect(server.url, keys) for server, keys in zip(servers, self.keys, strict=True)
        ]
        pairs = zip(self.clients, self.keys, strict=True)
        self.functions = [Functions(client, keys) for client, keys in pairs]

    async def open(self) -> None:
        for client in self.clients:
            await client.flushall()
            await ensure_library(client)

    async def spent_us(self) -> tuple[float, float]:
        """Of all servers: the time inside functions, and the processor time."""
        inside = processor = 0.0
        for client in self.clients:
            cpu, commands = await client.info("cpu"), await client.info("commandstats")
            processor += 1e6 * (float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]))
            inside += float(commands.get("cmdstat_fcall", {}).get("usec", 0))
        return inside, processor


Figures = tuple[float, float, float]  # calls/s; µs of the function, of the servers
Call = Callable[[], Awaitable[object]]


async def measure(fleet: Fleet, streams: Sequence[Iterable[Call]], num_calls: int) -> Figures:
    """Makes the calls of each stream one after the other."""

    async def work(calls: Iterable[Call]) -> None:
        for call in calls:
            await call()

    before, started_s = await fleet.spent_us(), time.monotonic()
    await asyncio.gather(*map(work, streams))
    took_s = time.monotonic() - started_s
    inside, processor = await fleet.spent_us()
    return (
        num_calls / took_s,
        (inside - before[0]) / num_calls,
        (processor - before[1]) / num_calls,
    )


def submissions(fleet: Fleet) -> list[Call]:
    calls, num = list[Call](), len(fleet.functions)
    terms = Submission(max_output_tokens=10_000, deadline_s=3600, retention_s=60)
    for number in range(NUM_JOBS):
        tenant = f"tenant{number % (16 * num)}"
        partition = partition_of_tenant(tenant, num)
        functions, job = fleet.functions[partition], _job(tenant, partition)
        calls.append(lambda f=functions, j=job: f.submit(j, terms))  # type: ignore[misc]
    return calls


async def appends(fleet: Fleet) -> list[list[Call]]:
    """The steps of one worker, which runs NUM_STREAMS jobs in each partition."""
    streams = list[list[Call]]()
    for functions in fleet.functions:
        claimed = await functions.claim("w", "m", ["standard"], **_TERMS)  # type: ignore[arg-type]
        numbers = range(1, 1 + NUM_APPENDS // len(fleet.functions))
        streams.append([_Step(functions, claimed, number) for number in numbers])
    return streams


class _Step:
    """An append of one token for each running job, after the step before it."""

    def __init__(self, functions: Functions, claimed: list[Claimed], number: int) -> None:
        self._functions = functions
        self._claimed = claimed
        self._number = number

    async def __call__(self) -> object:
        event = Tokens((ChoiceDelta(0, self._number - 1, (1,), "x"),))
        items = [Append(c.job.id, c.epoch, self._number, event, 1) for c in self._claimed]
        return await self._functions.append("w", items, lease_s=0)


def _job(tenant: str, partition: int) -> Job:
    return Job(
        id=new_job_id(partition),
        tenant=tenant,
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=tuple(range(200)),
        params=SamplingParams(max_tokens=10_000, seed=1),
        created_s=0,
    )


async def run(num_partitions: int, num_rounds: int, num_tasks: int) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(EmbeddedRedis()) for _ in range(num_partitions)]
        fleet = Fleet(servers)
        found: dict[str, list[Figures]] = {"submit": [], "append": []}
        for _ in range(num_rounds):
            await fleet.open()
            calls = iter(submissions(fleet))
            found["submit"].append(await measure(fleet, [calls] * num_tasks, NUM_JOBS))
            found["append"].append(await measure(fleet, await appends(fleet), NUM_APPENDS))
        for client in fleet.clients:
            await client.aclose()
        for what, figures in found.items():
            rate, inside_us, server_us = (
                sorted(each)[len(figures) // 2] for each in zip(*figures, strict=True)
            )
            numbers = f"{rate:,.0f}", f"{inside_us:.0f}", f"{server_us:.0f}"
            rows.append((what, str(num_partitions), *numbers, f"{1e6 / server_us:,.0f}"))
    return rows


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=16, help="submissions at once (default: 16)")
    options = parser.parse_args()
    head = "call", "partitions", "calls/s", "function µs", "server µs", "calls/s of a server"
    rows = list[tuple[str, ...]]()
    for num_partitions in (1, 2, 4):
        rows += await run(num_partitions, options.rounds, options.tasks)
    print(markdown_table([head, *sorted(rows, key=lambda row: row[0], reverse=True)]))


if __name__ == "__main__":
    asyncio.run(main())
