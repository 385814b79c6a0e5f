"""One overload: calibration, light tenants alone, ten times the capacity, and afterwards.

Limits, quotas and shares are those of an operator who expects overload.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import end_tasks
from contract.jobs import JobStatus
from tests.campaigns.command_line import silent
from tests.campaigns.load import Callers, side_by_side
from tests.campaigns.pool import MODEL, Pool, pool
from tests.fakes import HashModelOptions
from tests.fleet import until
from tests.overload.arrivals import (
    LIGHT,
    LIGHT_LOAD,
    MEAN_OUTPUT,
    TENANTS,
    arrivals,
    draw,
)
from tests.overload.report import BATCH_SHARE, Ended, OverloadReport, Phase

NUM_GATEWAYS = 2
NUM_SLOTS = 45  # sequences that run at once
FOLLOWERS = 0.5  # share of rejected callers that come back when told
BATCHING = f"""
max_num_seqs: {NUM_SLOTS}
lanes:
  interactive:
    priority: 0
  standard:
    priority: 1
    minimum_share: 0.2
  batch:
    priority: 2
    minimum_share: {BATCH_SHARE}
"""
LANE_SHARE = 0.5  # of a lane's limit of waiting tokens, for one tenant
_GATEWAY = {
    "BATCHWAY_LANE_BOUNDS": "interactive=0.05s,standard=3s,standard=2000,batch=2000",
    "BATCHWAY_SYNC_DEADLINE_S": "60",
    "BATCHWAY_MAX_CONNECTIONS_PER_ADDRESS": "0",  # all callers have one address
}
_HASH_MODEL = HashModelOptions(num_blocks=256, step_s=0.27)
_LEASE_S = 10.0  # long, because the machine is busy
_CLOSED_CALLERS = 2 * NUM_SLOTS  # within all limits: one waits for each that runs
_SETTLING_S = 2.0  # at the start of each phase, not counted
_MEMORY_EVERY_S = 0.25
_SAY_EVERY_S = 1.0
_REST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    """First `num_unloaded` jobs run one by one, then light tenants alone for `seconds`, then
    `factor` times the capacity for `seconds`, then light tenants for `after_s`."""

    factor: float = 10.0
    seconds: float = 60.0
    after_s: float = 60.0
    seed: int = 1
    num_unloaded: int = 100


async def run_overload(
    options: OverloadOptions, say: Callable[[str], None] = silent
) -> OverloadReport:
    """Runs to the end or until cancelled; leaves no process behind."""
    with tempfile.TemporaryDirectory(prefix="bw-overload-") as directory:
        batching = Path(directory) / "batching.yaml"
        batching.write_text(BATCHING)
        settings: dict[str, Any] = {"batching_path": str(batching), "lease_s": _LEASE_S}
        parts = pool(
            _HASH_MODEL, num_workers=1, num_gateways=NUM_GATEWAYS, gateway=_GATEWAY, **settings
        )
        async with parts as found:
            api_keys = ApiKeys(found.caller.client, found.caller.keys)
            terms = [KeyTerms(tenant=tenant, lane_share=LANE_SHARE) for tenant in TENANTS]
            made = {each.tenant: (await api_keys.create(each))[0] for each in terms}
            callers = Callers(found.urls, MODEL, made, options.seed, follow_share=FOLLOWERS)
            async with contextlib.aclosing(callers):
                return await _Overload(options, found, callers, say).run()


@dataclass
class _Overload:
    options: OverloadOptions
    pool: Pool
    callers: Callers
    say: Callable[[str], None]
    phases: dict[str, Phase] = field(default_factory=dict)
    memory_bytes: list[int] = field(default_factory=list)

    async def run(self) -> OverloadReport:
        start_bytes = await self._used_memory()
        async with self._watching():
            await self._unloaded()
            peak = await self._calibrate()
            capacity_per_s = peak / MEAN_OUTPUT
            seconds = self.options.seconds
            await self._open_loop("light tenants alone", LIGHT_LOAD, capacity_per_s, seconds)
            await self._overload(capacity_per_s)
            self.say("waiting until all that was accepted has ended")
            await self.callers.until_answered()
            await self._until_all_ended()
        return OverloadReport(
            factor=self.options.factor,
            seconds=self.options.seconds,
            seed=self.options.seed,
            peak_tokens_per_s=peak,
            phases=self.phases,
            calls=self.callers.attempts,
            num_told_later=self.callers.num_told_later,
            ended=await self._ended(),
            memory_bytes=(start_bytes, max(self.memory_bytes)),
            audit=await asyncio.to_thread(self.pool.audit),
        )

    async def _unloaded(self) -> None:
        """One call at a time, to measure admission without load. Each gateway's first call,
        which fills its caches, comes before the phase."""
        with self._phase("unloaded", settles=True):
            rng = random.Random(f"{self.options.seed} unloaded")
            for _ in range(self.options.num_unloaded):
                ask = replace(draw(rng, rng.choice(LIGHT), {"standard": 1.0}), num_output=1)
                await self.callers.call(ask)
                await self._until_all_ended()

    async def _calibrate(self) -> float:
        """Measures output tokens per second of a closed loop that keeps every slot busy."""
        duration_s = max(4 * _SETTLING_S, self.options.seconds / 2)
        rng = random.Random(f"{self.options.seed} calibration")
        with self._phase("calibration", settles=True) as phase:
            over_s = time.monotonic() + duration_s

            async def ask_on() -> None:
                while time.monotonic() < over_s:
                    await self.callers.call(draw(rng, rng.choice(LIGHT), {"standard": 1.0}))

            await side_by_side(*(ask_on() for _ in range(_CLOSED_CALLERS)))
            phase.end_s = phase.begin_s + duration_s - _SETTLING_S
        await self._until_all_ended()
        return phase.goodput(await self._ended())

    async def _overload(self, capacity_per_s: float) -> None:
        """The flood starts and ends, and rejected callers come back when told. Once the flood is
        answered, which on a busy machine takes long, light tenants continue."""
        options, callers = self.options, self.callers

        async def is_answered() -> bool:
            return not callers.num_unanswered()

        await self._open_loop("overload", options.factor, capacity_per_s, options.seconds)
        await until(is_answered, _REST_TIMEOUT_S)
        await self._open_loop("afterwards", LIGHT_LOAD, capacity_per_s, options.after_s)
        callers.stop_coming()

    async def _open_loop(
        self, name: str, factor: float, capacity_per_s: float, duration_s: float
    ) -> None:
        with self._phase(name, settles=name != "afterwards"):
            seed = f"{self.options.seed} {name}"
            await self.callers.send_all(arrivals(seed, capacity_per_s, factor, duration_s))

    @contextlib.contextmanager
    def _phase(self, name: str, *, settles: bool = False) -> Iterator[Phase]:
        begin_s = time.time() + (_SETTLING_S if settles else 0.0)
        phase = self.phases[name] = Phase(name, begin_s)
        yield phase
        phase.end_s = phase.end_s or time.time()

    # --- Redis --------------------------------------------------------------------------------

    async def _until_all_ended(self) -> None:
        caller = self.pool.caller

        async def none_open() -> bool:
            return not await caller.client.zcard(caller.keys.of("deadlines"))

        await until(none_open, _REST_TIMEOUT_S)

    async def _ended(self) -> list[Ended]:
        """Reads all accepted jobs from Redis."""
        found = []
        for call in self.callers.attempts:
            if call.is_admitted:
                read = await self.pool.caller.functions.read(call.job_id, call.ask.tenant)
                assert read is not None, "an accepted job is kept"
                view = read[0]
                assert view.finished_ms is not None
                assert view.first_token_ms is not None
                found.append(
                    Ended(
                        call.ask,
                        view.status is JobStatus.SUCCEEDED,
                        str(view.status),
                        view.created_ms / 1000,
                        view.first_token_ms / 1000,
                        view.finished_ms / 1000,
                        view.num_prompt_tokens,
                        view.num_output_tokens,
                    )
                )
        return found

    async def _used_memory(self) -> int:
        found: Any = await self.pool.caller.client.info("memory")
        return int(found["used_memory"])

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            await end_tasks(task)

    async def _watch(self) -> None:
        """Records the memory of Redis, and reports progress."""
        next_s = 0.0
        while True:
            self.memory_bytes.append(await self._used_memory())
            if time.monotonic() >= next_s and self.phases:
                next_s = time.monotonic() + _SAY_EVERY_S
                phase = list(self.phases.values())[-1]
                calls = [c for c in self.callers.attempts if c.sent_s >= phase.begin_s]
                num_admitted = sum(call.is_admitted for call in calls)
                self.say(
                    f"{phase.name}: {time.time() - phase.begin_s:.0f} s, {len(calls)} calls, "
                    f"{num_admitted} admitted, Redis {self.memory_bytes[-1] / 2**20:.1f} MiB"
                )
            await asyncio.sleep(_MEMORY_EVERY_S)
