"""All kinds of calls on the whole local stack: `python -m tests.endurance.soak --minutes M`.

After a warm-up and once the stack is idle, the memory, file descriptors, threads and Redis keys of
all parts are recorded. Under the load they must stay level; after it, and once what was kept for
callers has expired, all figures must be back. `--picture FILE` draws them over time.

Redis keeps the records of delivered callbacks, of ended batches and operations, and idempotency
keys for days. A run cannot wait for that, so it lets them expire after seconds.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis
import redis.asyncio

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import end_tasks
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import Receiver
from tests.campaigns.command_line import Progress, parser_of, run, silent
from tests.endurance.calls import (
    ALL_RIGHTS,
    BAD_ROW_ID,
    BEHAVIOURS,
    CLASSIFIER,
    EMBEDDER,
    FLOWS,
    LIMITED,
    RANKER,
)
from tests.endurance.footprint import Footprint, Tolerance, compare, take
from tests.endurance.load import NUM_CALLERS, Load
from tests.endurance.series import Sample, draw, sample_of, trends
from tests.fakes import HashModelOptions
from tests.fleet import until
from tests.hash_engine import HASH_MODEL_FILE
from tests.infra.stack import MODEL, Stack, running_fleet
from tests.oracle.audit import Audit
from tests.tiny_encoders import save_classifier, save_embedder

KEYS = Keys("soak")
NUM_WORKERS = 2
HASH_MODEL = HashModelOptions(step_s=0.005, num_blocks=256, bad_row_id=BAD_ROW_ID)
RETENTION_S = 3.0
SYNC_DEADLINE_S = 30.0  # the jobs of some calls are kept so long
_REST_TIMEOUT_S = 60.0
_POLL_S = 0.5
# The first requests import, compile and fill pools and caches: some minutes of them, or half of a
# shorter load.
_LONGEST_WARM_UP_S = 180.0
_LONGEST_RAMP_S = 60.0  # from rest until as much is forgotten as is made
_SAMPLE_S = 5.0
_API_KEY = "the key of a soak, with all rights"
_KEPT_FOR_DAYS = ("out", "batch", "batch_parts", "operation", "idem")


@dataclass
class SoakReport:
    """`samples`: seconds since the load began, until the stack was at rest again."""

    seed: int
    load_s: float
    before: Footprint
    after: Footprint
    samples: list[Sample]
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
        return {**figures, "samples": [sample.row() for sample in self.samples]}


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
        "BATCHWAY_SYNC_DEADLINE_S": f"{SYNC_DEADLINE_S:g}",
        "BATCHWAY_API_KEY": _API_KEY,
        "BATCHWAY_CALLBACK_ALLOW": "127.0.0.1",
    }
    with tempfile.TemporaryDirectory() as temp, EmbeddedRedis() as server:
        folder = Path(temp)
        flows = folder / "models.yaml"  # JSON is YAML, too
        models = [{"name": name, name: flow} for name, flow in FLOWS.items()]
        flows.write_text(json.dumps({"models": models}))
        arguments = (
            f"--redis-url={server.url}",
            f"--namespace={KEYS.namespace}",
            f"--object-store={folder / 'objects'}",
            f"--models={flows}",
        )
        stack_of_fleet = running_fleet(_fleet(folder), *arguments, environ=environ)
        async with Receiver(BEHAVIOURS) as receiver:
            with stack_of_fleet as stack:
                url = await asyncio.to_thread(lambda: stack.url)
                await _until_flows_are_known(url)
                api_keys = {ALL_RIGHTS: _API_KEY, LIMITED: await _limited_key(server.url)}
                load = Load(url, seed, api_keys, receiver.url(""))
                soak = _Soak(server, stack, load, say)
                return await soak.run(load_s, tolerance or Tolerance())


async def _until_flows_are_known(url: str) -> None:
    """The gateway publishes them once it knows their members."""
    headers = {"authorization": f"Bearer {_API_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:

        async def are_known() -> bool:
            models = (await http.get("/v1/models")).json()["data"]
            return {model["id"] for model in models} >= FLOWS.keys()

        await until(are_known)


def _fleet(folder: Path) -> Path:
    """Workers of the hash model, and one of each kind of encoder."""
    hash_model = folder / MODEL
    hash_model.mkdir()
    (hash_model / HASH_MODEL_FILE).write_bytes(msgspec.json.encode(HASH_MODEL))
    encoders = {
        EMBEDDER: save_embedder("bert", folder / EMBEDDER),
        RANKER: save_classifier("bert", folder / RANKER, 1),
        CLASSIFIER: save_classifier("bert", folder / CLASSIFIER, 3),
    }
    shared = {"device": "cpu", "threads": 1}
    own = {"engine_module": "tests.hash_engine", "count": NUM_WORKERS}
    entries: list[dict[str, Any]] = [{"model": str(hash_model), **own, **shared}]
    entries += [
        {"model": str(path), "served_model_name": name, "memory_share": 0.05, **shared}
        for name, path in encoders.items()
    ]
    fleet = folder / "fleet.yaml"
    fleet.write_text(json.dumps({"models": entries}))
    return fleet


async def _limited_key(redis_url: str) -> str:
    async with contextlib.aclosing(redis.asyncio.Redis.from_url(redis_url)) as client:
        terms = KeyTerms(tenant=LIMITED, requests_per_minute=1)
        return (await ApiKeys(client, KEYS).create(terms))[0]


@dataclass
class _Soak:
    server: EmbeddedRedis
    stack: Stack
    load: Load
    say: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)

    async def run(self, load_s: float, tolerance: Tolerance) -> SoakReport:
        warm_up_s = min(_LONGEST_WARM_UP_S, load_s / 2)
        self.say(f"warming up for {warm_up_s:.0f} s")
        await self.load.run(warm_up_s)
        before = await self._at_rest()
        self.load.counts.clear()
        async with self._sampling(load_s):
            await self.load.run(load_s)
            after = await self._at_rest()
        ramp_s = min(_LONGEST_RAMP_S, load_s / 2)
        under_load = [sample for sample in self.samples if ramp_s <= sample.at_s <= load_s]
        violations = compare(before, after, tolerance) + trends(under_load) + self.load.surprises
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
            _let_expire(client)
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
            with redis.Redis.from_url(self.server.url) as client:
                _let_expire(client)
            found = await self._take()
            self.samples.append(sample_of(passed_s, found))
            num_calls, rss = self.load.counts.total(), sum(p.rss_bytes for p in found.processes)
            self.say(
                f"{passed_s:.0f} of {load_s:.0f} s, {num_calls} calls, "
                f"{rss / 2**20:.0f} MiB, {len(found.keys)} keys"
            )


def _let_expire(client: redis.Redis) -> None:
    """Shortens the time to live of records that nobody works on any more."""
    for kind in _KEPT_FOR_DAYS:
        for key in client.scan_iter(KEYS.of(kind, "*"), count=1000):
            is_pending = kind == "out" and client.hget(key, "state") != b"delivered"
            if not is_pending and client.pttl(key) > 1000 * RETENTION_S:
                client.pexpire(key, int(1000 * RETENTION_S))


def main() -> int:
    parser = parser_of("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default: 10)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it: .svg or .png")
    options = parser.parse_args()

    async def soak() -> SoakReport:
        report = await run_soak(options.minutes * 60, options.seed, Progress().say)
        if options.picture is not None:
            draw(report.samples, report.load_s, options.picture)
        return report

    return run(soak, options.json)


if __name__ == "__main__":
    sys.exit(main())
