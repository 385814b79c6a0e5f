"""A mixed load on the whole local stack: `python -m tests.endurance.soak --minutes M`.

After a warm-up and once the stack is idle, the memory, file descriptors, threads and Redis keys of
all parts are recorded. After the load, and once what was kept for callers has expired, all figures
must be back.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from contract.connection import end_tasks
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.endurance.command_line import Progress, parser_of, run, silent
from tests.endurance.footprint import Footprint, Tolerance, compare, take
from tests.endurance.load import BAD_ROW_ID, NUM_CALLERS, Load
from tests.fakes import HashModelOptions
from tests.infra.stack import Stack, running_stack
from tests.oracle.audit import Audit

KEYS = Keys("soak")
NUM_WORKERS = 2
HASH_MODEL = HashModelOptions(step_s=0.005, num_blocks=256, bad_row_id=BAD_ROW_ID)
RETENTION_S = 3.0
_REST_TIMEOUT_S = 60.0
_POLL_S = 0.5
# The first requests import, compile and fill pools: a minute of them, or half of a shorter load.
_LONGEST_WARM_UP_S = 60.0
_SAMPLE_S = 5.0


@dataclass
class SoakReport:
    """`samples` are footprints under load, with seconds since the load began."""

    seed: int
    load_s: float
    before: Footprint
    after: Footprint
    samples: list[dict[str, Any]]
    calls: dict[str, int]
    violations: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        later = {one.pid: one for one in self.after.processes}
        figures: dict[str, Any] = {
            "load (s)": round(self.load_s, 1),
            "seed": self.seed,
            "callers": NUM_CALLERS,
            "calls": dict(sorted(self.calls.items())),
            "Redis": {
                "keys": f"{len(self.before.keys)} -> {len(self.after.keys)}",
                "KiB": f"{self.before.redis_bytes // 1024} -> {self.after.redis_bytes // 1024}",
            },
        }
        for one in self.before.processes:
            now = later.get(one.pid)
            figures[f"{one.kind} {one.pid}"] = (
                "ended"
                if now is None
                else {
                    "resident MiB": f"{one.rss_bytes / 2**20:.1f} -> {now.rss_bytes / 2**20:.1f}",
                    "file descriptors": f"{one.num_fds} -> {now.num_fds}",
                    "threads": f"{one.num_threads} -> {now.num_threads}",
                }
            )
        return {**figures, "samples": self.samples}


async def run_soak(
    load_s: float,
    seed: int,
    say: Callable[[str], None] = silent,
    tolerance: Tolerance | None = None,
) -> SoakReport:
    """Runs the load for this long, after a warm-up."""
    retention = f"{RETENTION_S:g}"
    environ = {
        "BATCHWAY_SYNC_RETENTION_S": retention,
        "BATCHWAY_JOB_RETENTION_S": retention,
    }
    with EmbeddedRedis() as server:
        arguments = (f"--workers={NUM_WORKERS}", f"--redis-url={server.url}")
        namespace = f"--namespace={KEYS.namespace}"
        with running_stack(*arguments, namespace, model=HASH_MODEL, environ=environ) as stack:
            url = await asyncio.to_thread(lambda: stack.url)
            soak = _Soak(server, stack, Load(url, seed), say)
            return await soak.run(load_s, tolerance or Tolerance())


@dataclass
class _Soak:
    server: EmbeddedRedis
    stack: Stack
    load: Load
    say: Callable[[str], None]
    samples: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, load_s: float, tolerance: Tolerance) -> SoakReport:
        warm_up_s = min(_LONGEST_WARM_UP_S, load_s / 2)
        self.say(f"warming up for {warm_up_s:.0f} s")
        await self.load.run(warm_up_s)
        before = await self._at_rest()
        self.load.counts.clear()
        async with self._sampling(load_s):
            await self.load.run(load_s)
        after = await self._at_rest()
        violations = compare(before, after, tolerance) + self.load.surprises
        return SoakReport(
            self.load.seed, load_s, before, after, self.samples, self.load.counts, violations
        )

    async def _take(self) -> Footprint:
        return await asyncio.to_thread(take, self.server, self.stack.process.pid)

    async def _at_rest(self) -> Footprint:
        """The footprint once every job has ended and expired. Raises AssertionError if something is
        left."""
        self.say("waiting until all is forgotten")
        give_up_s = time.monotonic() + _REST_TIMEOUT_S
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await asyncio.to_thread(self._check_at_rest)
                return await self._take()
            except AssertionError:
                if time.monotonic() > give_up_s:
                    raise

    def _check_at_rest(self) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            records: Any = client.keys(KEYS.of("job", "*"))
            assert not records, f"{len(records)} jobs are still kept"
            Audit(client, KEYS).check_at_rest()

    @contextlib.asynccontextmanager
    async def _sampling(self, load_s: float) -> AsyncIterator[None]:
        task = asyncio.create_task(self._sample(load_s))
        try:
            yield
        finally:
            await end_tasks(task)

    async def _sample(self, load_s: float) -> None:
        started_s = time.monotonic()
        while True:
            await asyncio.sleep(_SAMPLE_S)
            passed_s = time.monotonic() - started_s
            found = await self._take()
            self.samples.append({"at_s": round(passed_s, 1), **found.row()})
            num_calls, rss = self.load.counts.total(), sum(p.rss_bytes for p in found.processes)
            self.say(
                f"{passed_s:.0f} of {load_s:.0f} s, {num_calls} calls, "
                f"{rss / 2**20:.0f} MiB, {len(found.keys)} keys"
            )


def main() -> int:
    parser = parser_of("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default: 10)")
    options = parser.parse_args()
    return run(lambda: run_soak(options.minutes * 60, options.seed, Progress().say), options.json)


if __name__ == "__main__":
    sys.exit(main())
