"""Watches the fleet for people: its state now, and its rates over the last 15 minutes.

All figures are those of the metrics. While somebody watches, they are read each second, else each
five seconds, so that a page that opens has a past. Does not know who may see what.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from contract.errors import BatchwayError, BrokerUnavailable
from contract.function_types import FleetSnapshot, Watched, WorkerSnapshot
from contract.starts import ExpectedStart
from contract.telemetry.metrics import METRICS, Source
from gateway.http.metrics import Labels
from gateway.state import Gateway

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from contract.telemetry.metrics_reader import MetricsSamples

log = logging.getLogger("batchway.gateway")

_WATCHED_S, _UNWATCHED_S = 1.0, 5.0  # between two looks
_POINT_S = 5.0  # between two points of the past
_PAST_S = 900.0
_WINDOW_S = 10.0  # that rates and percentiles cover


async def families(gateway: Gateway) -> "tuple[list[Family], Mapping[str, FleetSnapshot] | None]":
    """The metrics of the fleet and of this gateway, and the fleet by model; None while Redis is
    down. prometheus_client is imported here, so that Lambda functions start faster."""
    from contract.telemetry.families import counted_families, fleet_families, gateway_families

    known = gateway.broker.known
    snapshots: Mapping[str, FleetSnapshot] | None
    try:
        snapshots, failures = await known.snapshots(), await known.failures()
        num_wanted = await known.num_wanted()
    except BrokerUnavailable:
        snapshots, failures, num_wanted = None, {}, {}
    now: dict[str, Mapping[Labels, int]] = {
        "broker_up": {(): int(snapshots is not None)},
        "unreadable_models": {(): known.num_unreadable},
        "failed_models": {(model, failed.reason): 1 for model, failed in failures.items()},
        "pool_workers_wanted": {(model,): num for model, num in num_wanted.items()},
    }
    found = [*gateway_families({**gateway.metrics.counts(), **now})]
    if snapshots is not None:
        totals = {model: snapshot.totals for model, snapshot in snapshots.items()}
        found += counted_families(totals, Source.JOBS, Source.ENGINES)
        found += fleet_families(snapshots)
    return found, snapshots


class FleetWatch:
    """What one gateway process knows of the fleet. `state`: now, as JSON values, {} where nobody
    watches; `points`: the last 15 minutes by model; `prices`: of a million output tokens by model,
    while it made some, from the price of a worker."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_watching = 0
        self._woken = asyncio.Event()
        self._looked = asyncio.Condition()
        self._recent: deque[tuple[float, MetricsSamples]] = deque()
        self.points: dict[str, deque[dict[str, Any]]] = {}
        self.prices: dict[str, float] = {}
        self._joined: dict[str, tuple[set[str], float]] = {}  # workers, when the last one came
        self.state: dict[str, Any] = {}

    async def run(self) -> None:
        """Looks at the fleet until it is cancelled."""
        while True:
            try:
                await self._look()
            except BatchwayError as exc:
                log.warning("the console has not read the fleet: %s", type(exc).__name__)
            except Exception:  # a mistake here must not end the look at all that follows
                log.exception("the console has not read the fleet")
            wait_s = _WATCHED_S if self._num_watching else _UNWATCHED_S
            try:
                await asyncio.wait_for(self._woken.wait(), wait_s)
            except TimeoutError:
                continue
            self._woken.clear()

    async def states(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the state, at once where somebody watches already, and after each look."""
        with self._watching():
            if self.state:
                yield self.state
            while True:
                async with self._looked:
                    await self._looked.wait()
                yield self.state

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._num_watching += 1
        self._woken.set()
        try:
            yield
        finally:
            self._num_watching -= 1

    async def _look(self) -> None:
        from contract.telemetry.metrics_reader import MetricsSamples, look

        found, snapshots = await families(self._gateway)
        if snapshots is None:
            await self._tell({**self.state, "at": time.time(), "is_broker_up": False})
            return
        now_s, samples = time.time(), MetricsSamples.of(found)
        while len(self._recent) > 1 and now_s - self._recent[1][0] >= _WINDOW_S:
            self._recent.popleft()
        before = self._recent[0] if self._recent else None
        self._recent.append((now_s, samples))
        gained, window_s = samples, None
        if before is not None:
            gained, window_s = samples.since(before[1]), now_s - before[0]
        if window_s:
            self._note_points(now_s, gained, window_s, snapshots)
            self._note_prices()
        if not self._num_watching:
            self.state = {}
            return
        read = look(samples, *((before[1], now_s - before[0]) if before else ()))
        watched = {model: await self._watch(model) for model in snapshots}
        some = next(iter(watched.values()), None)
        await self._tell(
            {
                "at": now_s,
                "is_broker_up": read.is_broker_up,
                "open_streams": read.open_streams,
                "refusals": read.refusals,
                "lanes": [asdict(row) for row in read.lanes],
                "engines": [asdict(row) for row in read.engines],
                "workers": [*_workers(snapshots)],
                "waiting": [_with(model, row) for model, w in watched.items() for row in w.waiting],
                "held": [_with(model, row) for model, w in watched.items() for row in w.held],
                "steps": _steps(gained),
                "deliveries": _by_label(samples, "webhook_deliveries_total", "outcome"),
                "callbacks": some and [some.num_due_callbacks, some.num_dead_callbacks],
                "models": await self._models(snapshots, samples),
                "worker_price": self._gateway.settings.worker_price,
                "prices": self.prices,
            }
        )

    async def _tell(self, state: dict[str, Any]) -> None:
        self.state = state
        async with self._looked:
            self._looked.notify_all()

    async def _watch(self, model: str) -> Watched:
        known = await self._gateway.broker.known.models()
        card = known.get(model)
        return await self._gateway.broker.watch(model, card.lanes if card is not None else ())

    async def _models(
        self, snapshots: Mapping[str, FleetSnapshot], samples: "MetricsSamples"
    ) -> list[dict[str, Any]]:
        """The models that workers serve or that are started on demand, each with its state."""
        known = self._gateway.broker.known
        cards, failures = await known.models(), await known.failures()
        wanted = _by_label(samples, "pool_workers_wanted", "model_name")
        flows = {name for name, card in cards.items() if card.flow is not None}
        shown = []
        for name in sorted({*cards, *known.declared, *failures} - flows):
            num_workers = len(snapshots[name].workers) if name in snapshots else 0
            start = await self._start(name, snapshots.get(name), wanted.get(name))
            failed = failures.get(name)
            state = "starting" if start else "failed" if failed else "no worker"
            since_s = start.since_s if start else failed.since_s if failed else None
            shown.append(
                {
                    "name": name,
                    "state": "ready" if num_workers else state,
                    "workers": num_workers,
                    "wanted": wanted.get(name),
                    "since_s": since_s,
                    "ready_in_s": start.ready_in_s if start else None,
                    "reason": failed.reason if failed else None,
                }
            )
        return shown

    async def _start(
        self, model: str, found: FleetSnapshot | None, num_wanted: int | None
    ) -> ExpectedStart | None:
        """The worker that starts. An idle pool announces when one would be ready, and wants none;
        an announcement stays for a while after its worker has joined."""
        names = {worker.incarnation for worker in found.workers} if found else set()
        before, joined_s = self._joined.get(model, (set(), 0.0))
        if found and names - before:
            joined_s = found.now_s
        self._joined[model] = names, joined_s
        start = None if num_wanted == 0 else await self._gateway.broker.known.expected_start(model)
        is_lacking = not names or (num_wanted or 0) > len(names)
        return start if start and (is_lacking or start.since_s > joined_s) else None

    def _note_points(
        self,
        now_s: float,
        gained: "MetricsSamples",
        window_s: float,
        snapshots: Mapping[str, FleetSnapshot],
    ) -> None:
        for model, snapshot in snapshots.items():
            past = self.points.setdefault(model, deque(maxlen=int(_PAST_S / _POINT_S)))
            if not past or now_s - past[-1]["at"] >= _POINT_S - 0.5:
                past.append({"at": now_s, **_point(model, snapshot, gained, window_s)})
        for gone in self.points.keys() - snapshots.keys():
            del self.points[gone]

    def _note_prices(self) -> None:
        """A model that is idle keeps its last price."""
        second = self._gateway.settings.worker_price / 3600
        for model, past in self.points.items() if second else ():
            busy = [point for point in past if point["tokens_out"]]
            if num_tokens := sum(point["tokens_out"] for point in busy):
                worker_s = sum(point["workers"] for point in busy)
                self.prices[model] = 1e6 * second * worker_s / num_tokens


def _workers(snapshots: Mapping[str, FleetSnapshot]) -> Iterator[dict[str, Any]]:
    for model, found in snapshots.items():
        for worker in found.workers:
            yield _worker(model, worker, "ready", None)
        for each in found.aside:
            yield _worker(model, each.worker, each.state, found.now_s - each.for_s)


def _worker(
    model: str, worker: WorkerSnapshot, state: str, since_s: float | None
) -> dict[str, Any]:
    fields = msgspec.structs.asdict(worker)
    more = {"kv_usage": worker.kv_usage, "state": state, "since_s": since_s}
    return {"model": model, **fields, **more}


def _with(model: str, row: msgspec.Struct) -> dict[str, Any]:
    return {"model": model, **msgspec.structs.asdict(row)}


def _by_label(samples: "MetricsSamples", name: str, label: str) -> dict[str, int]:
    found = {labels[label] for labels in samples.series(name)}
    return {value: int(samples.value(name, **{label: value})) for value in sorted(found)}


def _steps(gained: "MetricsSamples") -> list[dict[str, Any]]:
    """By model and batch size: how long steps took in the model, and how long was predicted."""
    found = []
    sizes = {(at["model_name"], at["batch"]) for at in gained.series("steps_total")}
    for model, batch in sorted(sizes):
        at = {"model_name": model, "batch": batch}
        if num := gained.value("steps_total", **at):
            took_s = gained.value("step_model_seconds_total", **at) / num
            predicted_s = gained.value("step_predicted_seconds_total", **at) / num
            found.append(
                {
                    "model": model,
                    "batch": int(re.findall("[0-9]+", batch)[-1]),  # of `17-32` the most
                    "took_s": took_s,
                    "predicted_s": predicted_s,
                }
            )
    return found


_RATES = {
    "tokens_in": "prompt_tokens_total",
    "tokens_out": "generation_tokens_total",
    "jobs": "requests_total",
    "recomputed": "tokens_recomputed_total",
    "preemptions": "num_preemptions_total",
}
_SPREADS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}


def _point(
    model: str, snapshot: FleetSnapshot, gained: "MetricsSamples", window_s: float
) -> dict[str, Any]:
    at = {"model_name": model}
    point: dict[str, Any] = {
        "waiting": sum(lane.num_queued for lane in snapshot.lanes.values()),
        "running": sum(lane.num_running for lane in snapshot.lanes.values()),
        "workers": len(snapshot.workers),
        "gpu": _mean([worker.gpu_share for worker in snapshot.workers]),
        "batch": gained.mean("batch_size", **at),
        "padding": gained.mean("padding_ratio", **at),
    }
    for name, metric in _RATES.items():
        point[name] = gained.value(metric, **at) / window_s
    for name, metric in _SPREADS.items():
        point[name] = [gained.quantile(metric, share, **at) for share in (0.5, 0.9, 0.99)]
    return point


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


assert all(metric in METRICS for metric in (*_RATES.values(), *_SPREADS.values()))
