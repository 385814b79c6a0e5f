"""A flood on a stack without settings: `python -m tests.overload.flood --jobs N --calls N`.

Posts jobs as fast as the gateway answers, and after a tenth of them all calls at once, half of them
in the interactive lane. Another caller calls in that lane at fixed intervals. Exit status 1 if a
response is not documented in docs/api.md, if Redis has no `maxmemory` or exceeded it, or if an
interactive call waited too long.
"""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from contract.connection import end_tasks
from gateway.prepare.calls import INTERACTIVE_TARGET_S
from tests.campaigns.command_line import Progress, parser_of, run, silent
from tests.campaigns.load import Ask, Attempt, Callers, side_by_side
from tests.campaigns.pool import stack_without_settings
from tests.overload.report import answers, seconds, undocumented

CALL_TOKENS = 100
INTERACTIVE_TOKENS = 16
STEP_S = 1.0  # longest step on a machine that is busy with the flood
_NUM_POSTERS = 64
_SHARE_BEFORE_CALLS = 0.1  # of the jobs
_TIMEOUT_S = 180.0  # more than the deadline of a call
_INTERACTIVE_EVERY_S = 0.5
_MEMORY_EVERY_S = 0.1
_LANES = ("standard", "interactive")  # of calls, in turns


@dataclass(frozen=True, slots=True)
class FloodOptions:
    """`lane` is the lane that the jobs name, '' for none."""

    num_jobs: int = 20_000
    num_calls: int = 400
    job_tokens: int = 900
    lane: str = ""


@dataclass
class FloodReport:
    """`took_s` lasts until the last job was answered. `memory_bytes` is Redis's maximum."""

    options: FloodOptions
    took_s: float
    jobs: Sequence[Attempt]
    calls: Sequence[Attempt]
    interactive: Sequence[Attempt]
    memory_bytes: int
    max_memory_bytes: int

    def _by_kind(self) -> dict[str, Sequence[Attempt]]:
        return {"jobs": self.jobs, "calls": self.calls, "interactive calls": self.interactive}

    @property
    def violations(self) -> list[str]:
        return [*self.faults(), *self.misses()]

    def faults(self) -> list[str]:
        """Violations on any machine."""
        found = []
        for kind, calls in self._by_kind().items():
            found += undocumented(kind, calls)
            without = [c for c in calls if c.status == 429 and c.retry_after_s is None]
            if without:
                found.append(f"{len(without)} {kind} were refused without Retry-After")
        broken = Counter(c.reason for c in (*self.calls, *self.interactive) if _is_broken(c))
        found += [f"{num} streams broke off: {why or 'no end'}" for why, num in broken.items()]
        if not 0 < self.memory_bytes < self.max_memory_bytes:
            found.append(f"Redis used {self.memory_bytes} bytes of {self.max_memory_bytes}")
        return found

    def misses(self) -> list[str]:
        """Goals that this run missed."""
        late = [s for s in self.ttfts(self.interactive) if s > INTERACTIVE_TARGET_S + STEP_S]
        return [f"{len(late)} interactive calls waited up to {max(late):.1f} s"] if late else []

    @staticmethod
    def ttfts(calls: Sequence[Attempt]) -> list[float]:
        return [s for call in calls if (s := call.ttft_from_sending_s) is not None]

    def figures(self) -> dict[str, Any]:
        return {
            "jobs in the lane": self.options.lane or "of no name",
            "all jobs were answered within (s)": round(self.took_s, 1),
            **{kind: answers(calls) for kind, calls in self._by_kind().items()},
            "answer to a job (s)": seconds([call.head_s for call in self.jobs]),
            "TTFT (s)": {
                kind: seconds(self.ttfts(calls))
                for kind, calls in self._by_kind().items()
                if kind != "jobs"
            },
            "calls that their deadline ended": sum(map(_is_late, self.calls)),
            "Retry-After (s)": {
                kind: seconds([s for call in calls if (s := call.retry_after_s) is not None])
                for kind, calls in self._by_kind().items()
            },
            "Redis (MiB)": {
                "at most": round(self.memory_bytes / 2**20, 1),
                "maxmemory": round(self.max_memory_bytes / 2**20, 1),
            },
        }


async def run_flood(options: FloodOptions, say: Callable[[str], None] = silent) -> FloodReport:
    """Runs to the last response or until cancelled; leaves no process behind."""
    async with stack_without_settings() as (url, client):
        callers = Callers([url], "demo", timeout_s=_TIMEOUT_S)
        return await _Flood(options, callers, client, say).run()


@dataclass
class _Flood:
    options: FloodOptions
    callers: Callers
    client: redis.asyncio.Redis
    say: Callable[[str], None]
    jobs: list[Attempt] = field(default_factory=list)
    calls: list[Attempt] = field(default_factory=list)
    interactive: list[Attempt] = field(default_factory=list)
    memory_bytes: int = 0
    is_over: bool = False

    async def run(self) -> FloodReport:
        started_s = time.monotonic()
        rest = iter(range(self.options.num_jobs))
        num_before = int(self.options.num_jobs * _SHARE_BEFORE_CALLS)
        beside = [asyncio.create_task(work) for work in (self._watch(), self._call_interactively())]
        try:
            await self._post(itertools.islice(rest, num_before))
            lanes = itertools.islice(itertools.cycle(_LANES), self.options.num_calls)
            calls = side_by_side(*(self._call(lane, CALL_TOKENS) for lane in lanes))
            beside.append(asyncio.create_task(calls))
            await self._post(rest)
            took_s = time.monotonic() - started_s
            await beside[2]
            self.is_over = True
            await beside[1]
        finally:
            await end_tasks(*beside)
        return FloodReport(
            self.options,
            took_s,
            self.jobs,
            self.calls,
            self.interactive,
            self.memory_bytes,
            int((await self._memory())["maxmemory"]),
        )

    async def _post(self, numbers: Iterator[int]) -> None:
        async def post() -> None:
            for _ in numbers:
                call = await self._ask(self.options.lane, self.options.job_tokens, is_job=True)
                self.jobs.append(call)

        await side_by_side(*(post() for _ in range(_NUM_POSTERS)))

    async def _call(self, lane: str, num_tokens: int) -> None:
        call = await self._ask(lane, num_tokens)
        (self.interactive if lane == "interactive" else self.calls).append(call)

    async def _call_interactively(self) -> None:
        """Calls at fixed intervals until the flood is over, without waiting for earlier calls."""
        async with asyncio.TaskGroup() as group:
            while not self.is_over:
                group.create_task(self._call("interactive", INTERACTIVE_TOKENS))
                await asyncio.sleep(_INTERACTIVE_EVERY_S)

    async def _ask(self, lane: str, num_tokens: int, *, is_job: bool = False) -> Attempt:
        ask = Ask("default", lane, "Once upon a time", num_tokens)
        return await self.callers.call(ask, is_job=is_job)

    async def _memory(self) -> Any:
        return await self.client.info("memory")

    async def _watch(self) -> None:
        while True:
            self.memory_bytes = max(self.memory_bytes, (await self._memory())["used_memory"])
            num_taken = sum(call.is_admitted for call in self.jobs)
            self.say(
                f"{len(self.jobs)} jobs answered, {num_taken} taken; "
                f"Redis {self.memory_bytes / 2**20:.1f} MiB at most"
            )
            await asyncio.sleep(_MEMORY_EVERY_S)


def _is_late(call: Attempt) -> bool:
    return call.status == 200 and call.reason in ("deadline", "deadline_exceeded")


def _is_broken(call: Attempt) -> bool:
    return call.status == 200 and not call.is_whole and not _is_late(call)


def main() -> int:
    parser = parser_of("flood", __doc__)
    parser.add_argument("--jobs", type=int, default=20_000, help="that are posted (default: 20000)")
    parser.add_argument("--calls", type=int, default=400, help="at once (default: 400)")
    parser.add_argument("--lane", default="", help="of the jobs (default: they name none)")
    given = parser.parse_args()
    options = FloodOptions(given.jobs, given.calls, lane=given.lane)
    return run(lambda: run_flood(options, Progress().say), given.json)


if __name__ == "__main__":
    sys.exit(main())
