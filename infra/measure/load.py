"""Sends load to a server: requests at given times, or a fixed number of concurrent callers."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from infra.measure.http_calls import Call, Caller, Outcome
from infra.measure.workloads import Workload

Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. An open loop sends at arrival times, independently of earlier requests;
    `max_concurrency`, if given, delays calls. A closed loop sends the next request as soon as one
    of `max_concurrency` callers is free."""

    workload: Workload
    is_open: bool
    max_concurrency: int | None
    rate_per_s: float | None = None
    hang_up_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.is_open or self.max_concurrency is not None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The results of a load; one call per request, in the workload's order. `wall_s` is from the
    start, the origin of arrival times, to the end of the last call."""

    load: Load
    calls: tuple[Call, ...]
    wall_s: float

    def raise_failures(self) -> None:
        """Raises RuntimeError with the reasons if a call was not answered."""
        failed = [call.reason for call in self.calls if call.outcome is not Outcome.SUCCEEDED]
        if failed:
            reasons = ", ".join(sorted(set(failed)))
            raise RuntimeError(f"{len(failed)} of {len(self.calls)} calls failed: {reasons}")


async def run_load(
    caller: Caller,
    load: Load,
    *,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Sleep = asyncio.sleep,
    progress: Callable[[Call], None] = lambda call: None,
) -> LoadRun:
    """Sends the load. Returns once all calls have ended."""
    start_s = clock_s()

    def now_s() -> float:
        return clock_s() - start_s

    requests = load.workload.requests
    calls = [Call(i, len(r.prompt_token_ids), r.arrival_s) for i, r in enumerate(requests)]
    hang_ups = _hang_ups(load)
    permits = asyncio.Semaphore(load.max_concurrency or len(requests))

    async def make(call: Call) -> None:
        """Makes a call once the semaphore permits; in a closed loop it arrives at that time."""
        async with permits:
            if not load.is_open:
                call.arrival_s = now_s()
            await caller.call(call, requests[call.number], now_s, hang_ups[call.number])
        progress(call)

    async with asyncio.TaskGroup() as group:
        for call in sorted(calls, key=lambda call: call.arrival_s):
            wait_s = call.arrival_s - now_s() if load.is_open else 0.0
            if wait_s > 0:
                await sleep(wait_s)
            group.create_task(make(call))
    return LoadRun(load, tuple(calls), now_s())


def _hang_ups(load: Load) -> list[int | None]:
    """For each request, after how many pieces of output its caller hangs up; None: never."""
    rng = random.Random(f"{load.seed} hang-ups")
    return [
        rng.randint(1, max(1, request.max_tokens // 2))
        if rng.random() < load.hang_up_share
        else None
        for request in load.workload.requests
    ]
