"""Sizes the pool of workers continuously: observes, decides (infra/pool.py), asks AWS, reports.

    python -m infra.aws.pool_service --ecs-cluster NAME --ecs-service NAME [options]
    python -m infra.aws.pool_service --decide-only [options]

One process per pool. It keeps its state in memory: after a restart it waits as long as usual before
any scale-in, and counts tasks that ended before the restart as never ready, if no worker lives. It
writes metrics to standard output in CloudWatch's embedded format. With --decide-only it publishes
how many workers there should be, and another scaler follows that.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from contract.catalogue import WORKER_TTL_S
from contract.connection import broker_errors, connect, now_ms, redis_url_of
from contract.errors import BrokerUnavailable
from contract.functions import Functions
from contract.keys import Keys
from contract.pauses import PauseLine, Pauses
from contract.starts import ANY_LANE, Starts
from contract.telemetry.metrics import embedded_line
from infra.aws.pool_metrics import FleetLines
from infra.aws.workforce import EcsService, OtherScaler, Workforce
from infra.pool import (
    MAX_WORKERS,
    Decision,
    PoolMemory,
    PoolPolicy,
    PoolView,
    decide,
    num_outdated_to_retire,
)

log = logging.getLogger("batchway.pool")

EVERY_S = 5.0
_REMEMBERED_S = 7200.0  # ECS shows a stopped task for one hour; stopping may take minutes
METRICS = {
    "DesiredWorkers": "Count",
    "ReadyWorkers": "Count",
    "BusyWorkers": "Count",
    "BacklogS": "Seconds",
    "BacklogOverTarget": "None",
    "StrandedTokens": "Count",
    "StrandedCalls": "None",
    "BreakerOpen": "Count",
    "FailedStarts": "Count",
    "DeadCallbacks": "Count",
}


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that takes jobs; `load` is the used share of its KV cache."""

    incarnation: str
    num_jobs: int
    load: float


@dataclass(frozen=True, slots=True)
class PoolState:
    """One observation. `tokens_per_s` is per worker, None until measured; `incarnations` are all
    live workers, including draining ones; `is_wanted`: calls were refused for want of one."""

    queued_tokens: dict[str, int]
    workers: tuple[ReadyWorker, ...]
    tokens_per_s: float | None
    incarnations: tuple[str, ...]
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class PoolWatch:
    """Reads the pool's state in its partition. Every method raises BrokerUnavailable."""

    client: redis.asyncio.Redis
    keys: Keys
    model: str
    lanes: Sequence[str]

    async def _queued_tokens(self, lane: str, pauses: Sequence[PauseLine]) -> int:
        """What waits in a lane for workers: not what is paused."""
        own = [line for line in pauses if line.model in ("", self.model)]
        tenants = {line.tenant for line in own if line.lane in ("", lane)}
        if "" in tenants:
            return 0
        key = self.keys.of("counters", self.model, lane)
        num_tokens = int(await self.client.hget(key, "queued_tokens") or 0)
        for tenant in tenants:
            key = self.keys.of("line", self.model, lane, tenant)
            num_tokens -= int(await self.client.hget(key, "tokens") or 0)
        return max(0, num_tokens)

    async def look(self) -> PoolState:
        since_ms = await now_ms(self.client) - int(WORKER_TTL_S * 1000)
        pauses = [pause.line for pause in await Pauses(self.client, self.keys).all()]
        with broker_errors(self.client, "HGET or ZRANGEBYSCORE"):
            queued = {lane: await self._queued_tokens(lane, pauses) for lane in self.lanes}
            names: Any = await self.client.zrangebyscore(
                self.keys.of("workers", self.model), since_ms, "+inf"
            )
            incarnations = tuple(name.decode() for name in names)
            seen = [await self._worker(name) for name in incarnations]
            rate = await self.client.hget(self.keys.of("pool", self.model), "tokens_per_s")
        starts = Starts(self.client, self.keys)
        lanes = (*self.lanes, ANY_LANE)
        wishes = [await starts.is_wanted(self.model, lane) for lane in lanes]
        workers = tuple(worker for worker in seen if worker is not None)
        return PoolState(queued, workers, float(rate or 0) or None, incarnations, any(wishes))

    async def _worker(self, incarnation: str) -> ReadyWorker | None:
        raw: Any = await self.client.hgetall(self.keys.of("worker", incarnation))
        if not raw or raw.get(b"state") == b"draining":
            return None
        info = json.loads(raw.get(b"info") or b"{}")
        num_blocks = info.get("num_blocks") or 0
        used = num_blocks - info.get("num_free_blocks", num_blocks)
        num_jobs = int(await self.client.scard(self.keys.of("own", incarnation)))
        return ReadyWorker(incarnation, num_jobs, used / num_blocks if num_blocks else 0.0)


@dataclass(slots=True)
class PoolService:
    """One pool. `clock_s` returns Unix time; `emit` receives each line of metrics."""

    policy: PoolPolicy
    watch: PoolWatch
    functions: Functions
    workforce: Workforce
    emit: Callable[[str], object] = print
    clock_s: Callable[[], float] = time.time
    memory: PoolMemory = field(default_factory=PoolMemory)
    fleet: FleetLines = field(init=False)
    failures: "Failures" = field(default_factory=lambda: Failures())
    num_dead: int | None = None  # callbacks given up, as last seen

    def __post_init__(self) -> None:
        self.fleet = FleetLines(self.watch.model)

    async def run(self) -> None:
        """Runs until cancelled. After an error it tries again at the next interval."""
        while True:
            try:
                await self.step()
            except BrokerUnavailable as exc:
                log.warning("cannot read the state of the pool: %s", exc)
            except Exception as exc:  # botocore has many kinds; none may end the service
                log.warning("step failed: %s", type(exc).__name__)
            await asyncio.sleep(EVERY_S)

    async def step(self) -> Decision:
        """Does one observation and acts on it. Raises BrokerUnavailable, and what boto3 raises."""
        observed = await self.watch.look()
        decision, retired = await asyncio.to_thread(self.size, observed)
        if retired:
            await self.functions.drain(retired)
        await self._tell(decision)
        snapshot = await self.functions.snapshot(self.watch.model, self.watch.lanes)
        num_dead = snapshot.deliveries.get("dead", 0)
        new_dead = max(0, num_dead - (num_dead if self.num_dead is None else self.num_dead))
        self.num_dead = num_dead
        lines = [self._metrics(observed, decision, new_dead), *self.fleet.lines(snapshot)]
        await asyncio.to_thread(self._emit_all, lines)
        return decision

    async def _tell(self, decision: Decision) -> None:
        """Publishes the decision for gateways and other scalers. Raises BrokerUnavailable."""
        starts, model = Starts(self.watch.client, self.watch.keys), self.watch.model
        await starts.decide(model, decision.num_workers)
        if decision.eta_s:
            await starts.announce(model, decision.eta_s)
        if decision.is_breaker_open:
            reason = f"{self.failures.num} workers in a row ended before they were ready"
            await starts.report_failure(model, reason, retry_in_s=decision.paused_s)
            self.failures.is_reported = True
        elif self.failures.is_reported and not self.failures.num:
            await starts.forget_failures([model])
            self.failures.is_reported = False

    def size(self, observed: PoolState) -> tuple[Decision, list[str]]:
        """Protects, decides and resizes. Returns also the workers to drain. Raises what boto3
        raises."""
        now_s, live = self.clock_s(), self.workforce.keep(observed.incarnations)
        failed_s = self.failures.look(self.workforce, live, now_s)
        num_desired = self.workforce.num_desired()
        names = [worker.incarnation for worker in observed.workers]
        outdated = self.workforce.outdated(names)
        num_replaced = 0
        if len(failed_s) < self.policy.crashes:  # otherwise their successors do not start
            num_replaced = num_outdated_to_retire(
                num_desired,
                len(names) - len(outdated),
                len(outdated),
                self.workforce.min_healthy_share(),
            )
        view = PoolView(
            now_s=now_s,
            queued_tokens=observed.queued_tokens,
            num_desired=num_desired,
            num_ready=len(names) - num_replaced,
            load=sum(worker.load for worker in observed.workers),
            tokens_per_s=observed.tokens_per_s,
            failed_starts_s=failed_s,
            is_wanted=observed.is_wanted,
            num_outdated=len(outdated) - num_replaced,
        )
        decision = decide(self.policy, view, self.memory)
        self.failures.log_pause(decision.paused_s)
        self.memory = decision.memory
        if decision.num_workers != num_desired:
            log.info(
                "pool %d -> %d (%s) ready=%d",
                num_desired, decision.num_workers, decision.reason, view.num_ready,
            )  # fmt: skip
            self.workforce.resize(decision.num_workers)
        # Outdated workers first, then the emptiest. They end when their jobs have ended.
        ordered = sorted(
            observed.workers, key=lambda w: (w.incarnation not in outdated, w.num_jobs, w.load)
        )
        num_retired = self.workforce.drains * (num_replaced + decision.num_to_retire)
        return decision, [worker.incarnation for worker in ordered[:num_retired]]

    def _emit_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.emit(line)

    def _metrics(self, observed: PoolState, decision: Decision, num_dead: int) -> str:
        values: dict[str, float | list[float]] = {
            "DesiredWorkers": decision.num_workers,
            "ReadyWorkers": len(observed.workers),
            "BusyWorkers": sum(worker.num_jobs > 0 for worker in observed.workers),
            "BacklogS": round(decision.backlog_s, 3),
            "BacklogOverTarget": round(decision.backlog_over_target, 3),
            "StrandedTokens": 0 if observed.workers else sum(observed.queued_tokens.values()),
            "StrandedCalls": int(observed.is_wanted and not observed.workers),
            "BreakerOpen": int(decision.is_breaker_open),
            "FailedStarts": self.failures.num,
            "DeadCallbacks": num_dead,
        }
        return embedded_line({"Model": self.watch.model}, values, METRICS, self.clock_s())


@dataclass(slots=True)
class Failures:
    """The starts that failed in a row: since a worker became ready, or what workers run changed."""

    is_reported: bool = False  # to gateways
    _failed_at_s: dict[str, float] = field(default_factory=dict)  # by task
    _ready_at_s: dict[str, float] = field(default_factory=dict)  # by the same, when last ready
    _since_s: float = 0.0
    _version: str | None = None
    _num_logged: int = 0

    @property
    def num(self) -> int:
        return len(self._failed_at_s)

    def look(self, workforce: Workforce, live: Sequence[str], now_s: float) -> list[float]:
        """When they failed. `live`: tasks of live workers. Raises what boto3 raises."""
        version = workforce.version()
        if self._version not in (None, version) or set(live) - self._ready_at_s.keys():
            self._failed_at_s.clear()
            self._since_s, self._num_logged = now_s, 0
        self._version = version
        self._ready_at_s |= dict.fromkeys(live, now_s)
        self._ready_at_s = {
            name: at_s for name, at_s in self._ready_at_s.items() if now_s - at_s < _REMEMBERED_S
        }
        for one in workforce.failed():
            if one.name not in self._ready_at_s and one.at_s > self._since_s:
                self._failed_at_s[one.name] = one.at_s
        return list(self._failed_at_s.values())

    def log_pause(self, paused_s: float) -> None:
        """Logs once for each further failure that no worker is started."""
        if paused_s and self.num != self._num_logged:
            self._num_logged = self.num
            log.error(
                "no worker is started for %.0f s: %d in a row ended before they were ready; the "
                "workers' log says why", paused_s, self.num,
            )  # fmt: skip


def wait_targets(raw: str) -> dict[str, float]:
    """Parses `lane=seconds,…`, most urgent first. Raises argparse.ArgumentTypeError."""
    try:
        pairs = [part.split("=") for part in raw.split(",")]
        return {lane.strip(): float(seconds) for lane, seconds in pairs}
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"must be lane=seconds,…, not {raw!r}") from exc


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.aws.pool_service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ecs-cluster", metavar="NAME")
    workforce = parser.add_mutually_exclusive_group(required=True)
    workforce.add_argument("--ecs-service", metavar="NAME", help="the service, in --ecs-cluster")
    workforce.add_argument(
        "--decide-only", action="store_true",
        help="resize nothing: another scaler follows the gateways' batchway_pool_workers_wanted",
    )  # fmt: skip
    parser.add_argument("--model-name", required=True, metavar="NAME")
    parser.add_argument("--min-workers", type=int, default=0)
    parser.add_argument("--max-workers", type=int, default=MAX_WORKERS)
    default = "interactive=5,standard=60,batch=900"
    parser.add_argument("--wait-targets", type=wait_targets, default=wait_targets(default))
    parser.add_argument("--worker-tokens-per-s", type=float, default=1000.0)
    parser.add_argument("--cold-start-s", type=float, default=300.0)
    parser.add_argument("--lanes", default="interactive,standard,batch")
    return parser


def policy_of(given: argparse.Namespace) -> PoolPolicy:
    """Raises ValueError."""
    lanes = given.lanes.split(",")
    if unknown := [lane for lane in lanes if lane not in given.wait_targets]:
        raise ValueError(f"--wait-targets: none for {unknown[0]!r}")
    return PoolPolicy(
        wait_targets_s={lane: given.wait_targets[lane] for lane in lanes},
        min_workers=given.min_workers,
        max_workers=given.max_workers,
        worker_tokens_per_s=given.worker_tokens_per_s,
        cold_start_s=given.cold_start_s,
    )


def workforce_of(given: argparse.Namespace, client_of: Callable[[str], Any]) -> Workforce:
    """Raises ValueError."""
    if given.decide_only:
        return OtherScaler()
    if not given.ecs_cluster:
        raise ValueError("--ecs-service needs --ecs-cluster")
    return EcsService(client_of("ecs"), given.ecs_cluster, given.ecs_service)


def emitter_of(given: argparse.Namespace) -> Callable[[str], object]:
    if given.decide_only:
        return lambda _: None  # the gateways' pages have it
    return lambda line: print(line, flush=True)


async def serve(
    given: argparse.Namespace, client_of: Callable[[str], Any], redis_url: str, keys: Keys
) -> None:
    """Runs until cancelled. Raises ValueError. `client_of` creates boto3's client of a service."""
    policy, workforce = policy_of(given), workforce_of(given, client_of)
    async with connect(redis_url, keys) as client:
        watch = PoolWatch(client, keys, given.model_name, tuple(policy.wait_targets_s))
        functions, emit = Functions(client, keys), emitter_of(given)
        await PoolService(policy, watch, functions, workforce, emit=emit).run()


def main(arguments: Sequence[str] | None = None) -> int:
    given = build_parser().parse_args(arguments)
    url = redis_url_of(os.environ)
    if url is None:
        print("no Redis given: set the variable REDIS_URL", file=sys.stderr)
        return 2

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    namespace = os.environ.get("BATCHWAY_NAMESPACE") or "default"
    try:
        keys = Keys(namespace, int(os.environ.get("BATCHWAY_PARTITION") or 0))
        asyncio.run(serve(given, _client_of, url, keys))
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


def _client_of(service: str) -> Any:
    import boto3  # not needed by --decide-only

    return boto3.client(service)


if __name__ == "__main__":
    raise SystemExit(main())
