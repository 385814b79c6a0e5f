"""Replays a trace of arrivals against the pool's decisions: its cost and missed targets.

    python -m infra.pool_replay --trace FILE [--plot FILE]

The trace format is in infra/traces.py. Workers are simulated: each computes a fixed number of
tokens per second, shared evenly among its requests and limited to a stream's rate; a prompt token
costs a fraction of an output token. A request goes to the emptiest worker with room.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from infra.pool import MAX_WORKERS, PoolMemory, PoolPolicy, PoolView, decide
from infra.tables import markdown_table
from infra.traces import Arrival, read_trace, with_gap

_TICK_S = 0.5
_DECIDE_EVERY_TICKS = 10  # as often as the pool service


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """Assumed properties of a worker; the defaults are not measured."""

    tokens_per_s: float = 500.0
    stream_tokens_per_s: float = 25.0
    prompt_token_cost: float = 0.05  # relative to an output token
    linger_s: float = 300.0  # for which its machine stays, and is paid, after it has ended

    @property
    def num_streams(self) -> int:
        """How many streams run at full speed."""
        return int(self.tokens_per_s / self.stream_tokens_per_s)

    def cost(self, arrival: Arrival) -> float:
        return arrival.output_tokens + self.prompt_token_cost * arrival.prompt_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a setting. A request is missed if it waits longer than the target to start."""

    name: str
    gpu_hours: float
    num_requests: int
    num_missed: int
    p99_wait_s: float
    max_workers: int

    @property
    def missed_share(self) -> float:
        return self.num_missed / max(1, self.num_requests)


@dataclass(slots=True, eq=False)
class _Worker:
    ready_s: float
    is_retired: bool = False
    left: list[float] = field(default_factory=list)  # remaining work of each request, in tokens


def replay(
    name: str,
    arrivals: Sequence[Arrival],
    policy: PoolPolicy,
    model: WorkerModel,
    *,
    target_s: float,
    num_at_start: int = 0,
) -> Outcome:
    """Replays a trace. A GPU is paid for from its request until its machine is released."""
    pool = [_Worker(0.0) for _ in range(num_at_start)]
    waiting: deque[Arrival] = deque()
    waits_s: list[float] = []
    coming = deque(arrivals)
    memory, num_desired, most, gpu_s, now_s, tick = PoolMemory(), num_at_start, 0, 0.0, 0.0, 0
    while coming or waiting or any(worker.left for worker in pool):
        while coming and coming[0].at_s <= now_s:
            waiting.append(coming.popleft())
        if tick % _DECIDE_EVERY_TICKS == 0:
            seen = _view(now_s, pool, waiting, model, num_desired)
            decision = decide(policy, seen, memory)
            memory, num_desired = decision.memory, decision.num_workers
            _resize(pool, num_desired, now_s, policy.cold_start_s)
        waits_s += _assign(pool, waiting, model, now_s)
        _compute(pool, model)
        kept = [worker for worker in pool if worker.left or not worker.is_retired]
        gpu_s += (len(pool) - len(kept)) * model.linger_s
        pool[:] = kept
        gpu_s += len(pool) * _TICK_S
        most = max(most, len(pool))
        now_s, tick = now_s + _TICK_S, tick + 1
    waits_s.sort()
    return Outcome(
        name,
        gpu_s / 3600,
        len(waits_s),
        sum(wait_s > target_s for wait_s in waits_s),
        waits_s[int(0.99 * (len(waits_s) - 1))] if waits_s else 0.0,
        most,
    )


def _view(
    now_s: float,
    pool: Sequence[_Worker],
    waiting: Sequence[Arrival],
    model: WorkerModel,
    num_desired: int,
) -> PoolView:
    ready = [w for w in pool if w.ready_s <= now_s and not w.is_retired]
    return PoolView(
        now_s=now_s,
        queued_tokens={"interactive": round(sum(map(model.cost, waiting)))},
        num_desired=num_desired,
        num_ready=len(ready),
        load=sum(len(worker.left) for worker in ready) / model.num_streams,
        tokens_per_s=model.tokens_per_s,
    )


def _resize(pool: list[_Worker], num: int, now_s: float, cold_start_s: float) -> None:
    active = [worker for worker in pool if not worker.is_retired]
    pool += [_Worker(now_s + cold_start_s) for _ in range(num - len(active))]
    # First those that are starting, then the emptiest.
    active.sort(key=lambda worker: (worker.ready_s <= now_s, len(worker.left)))
    for worker in active[: max(0, len(active) - num)]:
        worker.is_retired = True


def _assign(
    pool: Sequence[_Worker], waiting: deque[Arrival], model: WorkerModel, now_s: float
) -> list[float]:
    ready = [w for w in pool if w.ready_s <= now_s and not w.is_retired]
    waits_s = []
    while waiting and ready:
        worker = min(ready, key=lambda one: len(one.left))
        if len(worker.left) >= model.num_streams:
            break
        arrival = waiting.popleft()
        worker.left.append(model.cost(arrival))
        waits_s.append(now_s - arrival.at_s)
    return waits_s


def _compute(pool: Sequence[_Worker], model: WorkerModel) -> None:
    for worker in pool:
        if worker.left:
            speed = min(model.stream_tokens_per_s, model.tokens_per_s / len(worker.left))
            worker.left = [left - speed * _TICK_S for left in worker.left]
            worker.left = [left for left in worker.left if left > 0]


def compare(
    arrivals: Sequence[Arrival],
    policy: PoolPolicy,
    model: WorkerModel,
    target_s: float,
    num_at_start: int,
) -> list[Outcome]:
    """Replays the pool with several settings, and fixed pools of each size up to its largest."""
    half = max(1, policy.max_workers // 4)
    settings = {
        "pool": (policy, num_at_start),
        "pool, from zero": (policy, 0),
        f"pool, min {half}": (replace(policy, min_workers=half), num_at_start),
        "pool, in after 60 s": (replace(policy, scale_in_after_s=60.0), num_at_start),
        "pool, in after 900 s": (replace(policy, scale_in_after_s=900.0), num_at_start),
        "pool, growth 1": (replace(policy, growth=1.0), num_at_start),
        "pool, cold start 60 s": (replace(policy, cold_start_s=60.0), num_at_start),
    }
    for num in range(1, policy.max_workers + 1):
        fixed = replace(policy, min_workers=num, max_workers=num)
        settings[f"fixed {num}"] = (fixed, num)
    return [
        replay(
            name, arrivals, one, model, target_s=target_s, num_at_start=max(num, one.min_workers)
        )
        for name, (one, num) in settings.items()
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [["setting", "GPU hours", "missed", "99th percentile of waits (s)", "most workers"]]
    for one in outcomes:
        missed, wait_s = f"{one.missed_share:.2%}", f"{one.p99_wait_s:.1f}"
        rows.append([one.name, f"{one.gpu_hours:.2f}", missed, wait_s, str(one.max_workers)])
    return markdown_table(rows)


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Plots GPU hours against misses. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.subplots()
    fixed = [one for one in outcomes if one.name.startswith("fixed")]
    hours, missed = _points(fixed)
    axes.plot(hours, missed, "o-", color="tab:grey")
    for one, x, y in zip(fixed, hours, missed, strict=True):
        axes.annotate(one.name, (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
    markers = "os^vD*PX"
    for number, one in enumerate(one for one in outcomes if one not in fixed):
        axes.plot(*_points([one]), markers[number % len(markers)], label=one.name)
    axes.legend(fontsize=8)
    axes.set(xlabel="GPU hours", ylabel="requests that waited too long (%)", title=title)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _points(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    return [one.gpu_hours for one in outcomes], [100 * one.missed_share for one in outcomes]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.pool_replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--gap-s", type=float, default=0.0, help="play it twice, so far apart")
    parser.add_argument("--at-start", type=int, default=0, help="workers that are there already")
    parser.add_argument("--target-s", type=float, default=5.0, help="a request may wait so long")
    parser.add_argument("--cold-start-s", type=float, default=300.0)
    parser.add_argument("--max-workers", type=int, default=MAX_WORKERS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg or .png; needs matplotlib")
    given = parser.parse_args(arguments)
    arrivals = read_trace(given.trace)
    if given.gap_s:
        arrivals = with_gap(arrivals, given.gap_s)
    policy = PoolPolicy(
        wait_targets_s={"interactive": given.target_s},
        max_workers=given.max_workers,
        cold_start_s=given.cold_start_s,
    )
    outcomes = compare(arrivals, policy, WorkerModel(), given.target_s, given.at_start)
    print(table(outcomes))
    if given.plot is not None:
        title = f"{len(arrivals)} requests, cold start {given.cold_start_s:g} s"
        plot(outcomes, given.plot, title)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
