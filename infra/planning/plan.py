"""`batchway plan`: the batch size, the replicas and the configuration for a model on a device."""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from infra.planning.devices import DEVICES, ENGINES, EngineCard, Precision
from infra.planning.engine import LoadPoint, RequestLengths, Server, closed_loop, open_loop
from infra.planning.outcome import Goal as Goal
from infra.planning.shapes import ModelShape, Sizes
from infra.preconditions import Failed
from workers.ipc.messages import StrategyName, StrategyOptions

PRESETS: Mapping[str, tuple[float, str]] = {
    "throughput": (0.8, "80% of the sequences that fit: the most tokens for the money"),
    "balanced": (0.5, "half of them: room for bursts and for longer prompts"),
    "latency": (0.25, "a quarter of them: short steps, so short waits between tokens"),
}
_HIGHEST_UTILISATION = 0.95
_MOST_PLACES = 512  # more callers of small models: what the host does decides, not the device
_NUM_SIMULATED = 400  # requests of the open loop
_MOST_REPLICAS = 10_000
_SEED = 1
_SPREAD = 0.5  # of outputs, where strategies are compared: equal ones hide what differs


class NothingFits(Failed):
    """The model, or what is asked of it, does not fit. The message says what binds."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Waiting for one of the places of all replicas: by the M/G/k approximation of Allen and
    Cunneen (1978), and in the simulated engine of one replica. Times in seconds."""

    replicas: int
    utilisation: float
    wait_s: float
    simulated_ttft_s: float
    simulated_ttft_p99_s: float
    window_s: float  # in which a dynamic batch of the chosen size gathers, or half the slack


@dataclass(frozen=True, slots=True)
class Plan:
    """All figures, and the reasons for what was chosen."""

    server: Server
    work: RequestLengths
    goal: Goal
    points: tuple[LoadPoint, ...]  # of the sizes that were asked for
    curve: tuple[LoadPoint, ...]
    presets: Mapping[str, LoadPoint]
    strategies: Mapping[StrategyName, LoadPoint]
    largest_batch: int
    knee: int
    batch: int
    binds: str
    utilisation: float  # of one replica's places to aim at
    queue: Queue | None
    gpu_s_per_million: float  # output tokens
    alternatives: tuple[tuple[str, Precision, float], ...]  # device, precision, tokens/s

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON; times in milliseconds, with the error of its times."""
        server = self.server
        return {
            "model": server.sizes.shape.name,
            "precision": server.sizes.precision,
            "isl": self.work.isl,
            "osl": self.work.osl,
            "weights_bytes": server.sizes.weight_bytes,
            "kv_bytes_per_sequence": server.sizes.kv_bytes(self.work.length),
            "kv_bytes_free": round(server.free_bytes),
            "largest_batch": self.largest_batch,
            "error": server.engine.error,
            "points": [_as_row(point) for point in self.points],
            "curve": [_as_row(point) for point in self.curve],
            "knee": self.knee,
            "presets": {name: _as_row(point) for name, point in self.presets.items()},
            "strategies": {name: _as_row(point) for name, point in self.strategies.items()},
            "batch": self.batch,
            "binds": self.binds,
            "utilisation": self.utilisation,
            "queue": asdict(self.queue) if self.queue else None,
            "gpu_s_per_million_tokens": self.gpu_s_per_million,
            "alternatives": [
                {"device": device, "precision": precision, "output_tokens_per_s": rate}
                for device, precision, rate in self.alternatives
            ],
        }


def _as_row(point: LoadPoint) -> dict[str, float]:
    return {
        "concurrency": point.concurrency,
        "output_tokens_per_s": point.output_tokens_per_s,
        "requests_per_s": point.requests_per_s,
        "ttft_ms": 1000 * point.ttft_s,
        "ttft_p99_ms": 1000 * point.ttft_p99_s,
        "itl_ms": 1000 * point.itl_s,
        "e2e_ms": 1000 * point.e2e_s,
        "e2e_p99_ms": 1000 * point.e2e_p99_s,
    }


def server_of(
    shape: ModelShape, device: str, engine: str, precision: Precision, memory_share: float
) -> Server:
    """Raises NothingFits where the device does not compute the precision."""
    card, limits = ENGINES[engine], DEVICES[device]
    if precision not in limits.flops_per_s:
        known = ", ".join(limits.flops_per_s)
        raise NothingFits(f"{device} does not compute {precision}; it computes {known}")
    return Server(_sizes(shape, precision, card), limits, card, memory_share)


def _sizes(shape: ModelShape, precision: Precision, card: EngineCard) -> Sizes:
    return Sizes(shape, precision, 1 if precision == "fp8" and card.has_small_kv else 2)


def make_plan(
    server: Server,
    work: RequestLengths,
    goal: Goal,
    at: Seq[int] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Raises NothingFits."""
    largest = min(_check_fits(server, work), _MOST_PLACES)
    found: dict[int, LoadPoint] = {}

    def measured(batch: int) -> LoadPoint:
        if batch not in found:
            progress(f"simulating {batch} callers")
            found[batch] = closed_loop(server, work, batch)
        return found[batch]

    points = tuple(measured(batch) for batch in at)
    sizes = {min(largest, 2**n) for n in range(largest.bit_length() + 1)}
    curve = tuple(measured(batch) for batch in sorted(sizes))
    presets = {
        name: measured(max(1, round(share * largest))) for name, (share, _) in PRESETS.items()
    }
    # Where throughput for the time that an answer takes is highest (Kleinrock, "Power", 1979).
    knee = max(curve, key=lambda point: point.output_tokens_per_s / point.e2e_s)
    chosen, binds = _choose(found, goal, knee, largest)
    queue = _queue(server, work, goal, chosen, progress) if goal.rate_per_s else None
    mixed = replace(work, spread=_SPREAD)
    strategies = {
        name: closed_loop(server, mixed, int(chosen.concurrency), options)
        for name, options in each_strategy(int(chosen.concurrency)).items()
    }
    return Plan(
        server=server,
        work=work,
        goal=goal,
        points=points,
        curve=curve,
        presets=presets,
        strategies=strategies,
        largest_batch=largest,
        knee=int(knee.concurrency),
        batch=int(chosen.concurrency),
        binds=binds,
        utilisation=_utilisation(goal, chosen),
        queue=queue,
        gpu_s_per_million=1e6 / chosen.output_tokens_per_s,
        alternatives=_alternatives(server, work),
    )


def _check_fits(server: Server, work: RequestLengths) -> int:
    """The largest batch. Raises NothingFits."""
    shape = server.sizes.shape
    if work.length > shape.max_model_len:
        raise NothingFits(
            f"the context: {work.isl} and {work.osl} tokens are more than the model's "
            f"{shape.max_model_len}"
        )
    largest = server.largest_batch(work.length)
    if largest < 1:
        memory = server.memory_share * server.device.memory_bytes
        each = server.sizes.kv_bytes(work.length)
        fitting = [
            f"{device} in {precision}" for device, precision, _ in _alternatives(server, work)
        ]
        helps = (
            f"one of these would do: {', '.join(fitting[:4])}" if fitting else "no one GPU would do"
        )
        raise NothingFits(
            f"memory: {server.sizes.weight_bytes / 1e9:.1f} GB of weights, a step and "
            f"{each / 1e9:.2f} GB of KV do not fit into {memory / 1e9:.1f} GB; {helps}"
        )
    return largest


def _choose(
    found: Mapping[int, LoadPoint], goal: Goal, knee: LoadPoint, largest: int
) -> tuple[LoadPoint, str]:
    """The largest batch that meets the goals, else the knee; and what keeps it from being larger.
    Raises NothingFits if even one sequence misses them."""
    if goal.ttft_s is None and goal.itl_s is None:
        binds = "memory" if knee.concurrency == largest else "the knee: more callers wait longer"
        return knee, binds
    fitting = [
        point for size, point in found.items() if size <= largest and not _missed(goal, point)
    ]
    if not fitting:
        least = found[min(found)]
        raise NothingFits(
            f"{_missed(goal, least)}: one sequence alone takes {1000 * least.ttft_s:.0f} ms to its "
            f"first token and {1000 * least.itl_s:.1f} ms for each further one"
        )
    best = max(fitting, key=lambda point: point.concurrency)
    next_size = min((size for size in found if best.concurrency < size <= largest), default=None)
    return best, "memory" if next_size is None else _missed(goal, found[next_size]) or "memory"


def _missed(goal: Goal, point: LoadPoint) -> str | None:
    return goal.missed(point.ttft_s, point.itl_s)


def erlang_c(num_places: int, load: float) -> float:
    """The share of arrivals that wait, for `load` = rate * service time < num_places (Erlang,
    1917)."""
    inverse = 1.0
    for place in range(1, num_places + 1):
        inverse = 1.0 + inverse * place / load
    blocked = 1.0 / inverse
    return blocked / (1.0 - load / num_places * (1.0 - blocked))


def mgk_wait_s(rate_per_s: float, service_s: float, spread: float, num_places: int) -> float:
    """The mean wait for a place; math.inf where arrivals exceed them. `spread`: the squared
    coefficient of variation of service times (Allen and Cunneen, 1978)."""
    load = rate_per_s * service_s
    if load >= num_places:
        return math.inf
    if load <= 0.0:
        return 0.0
    waits = erlang_c(num_places, load)
    return waits * service_s / (num_places - load) * (1.0 + spread) / 2.0


def _slack_s(goal: Goal, chosen: LoadPoint) -> float:
    """The wait that the goal leaves; without one as long as a first token takes."""
    return goal.ttft_s - chosen.ttft_s if goal.ttft_s else chosen.ttft_s


def _utilisation(goal: Goal, chosen: LoadPoint) -> float:
    """The highest, in whole percent, at which the mean wait for a place fits into the slack."""
    places, slack_s = int(chosen.concurrency), _slack_s(goal, chosen)
    most = round(100 * _HIGHEST_UTILISATION)
    return max(
        percent / 100
        for percent in range(most + 1)
        if mgk_wait_s(percent / 100 * places / chosen.e2e_s, chosen.e2e_s, 0.0, places) <= slack_s
    )


def _queue(
    server: Server,
    work: RequestLengths,
    goal: Goal,
    chosen: LoadPoint,
    progress: Callable[[str], None],
) -> Queue:
    """The fewest replicas whose callers, on average, wait no longer than the goal leaves."""
    assert goal.rate_per_s is not None
    places = int(chosen.concurrency)
    slack_s = _slack_s(goal, chosen)
    for replicas in range(1, _MOST_REPLICAS + 1):
        utilisation = goal.rate_per_s * chosen.e2e_s / (places * replicas)
        wait_s = mgk_wait_s(goal.rate_per_s, chosen.e2e_s, 0.0, places * replicas)
        if utilisation <= _HIGHEST_UTILISATION and wait_s <= slack_s:
            break
    else:
        raise NothingFits(f"rate: it needs more than {_MOST_REPLICAS} replicas")
    own_rate = goal.rate_per_s / replicas
    progress(f"simulating {own_rate:.3g} requests/s to one of {replicas}")
    seen = open_loop(server, work, places, own_rate, _NUM_SIMULATED, _SEED)
    return Queue(
        replicas=replicas,
        utilisation=utilisation,
        wait_s=wait_s,
        simulated_ttft_s=seen.ttft_s,
        simulated_ttft_p99_s=seen.ttft_p99_s,
        window_s=min((places - 1) / own_rate, slack_s / 2),
    )


def each_strategy(batch: int) -> dict[StrategyName, StrategyOptions]:
    """All strategies, with batches of this size."""
    return {
        "static": StrategyOptions(name="static", batch_size=batch),
        "dynamic": StrategyOptions(name="dynamic", batch_size=batch),
        "continuous": StrategyOptions(),
    }


def _alternatives(server: Server, work: RequestLengths) -> tuple[tuple[str, Precision, float], ...]:
    """Devices and precisions, the fastest first: output tokens/s of half of the sequences that fit,
    by the times of a prompt and of a step in the middle of the outputs."""
    found: list[tuple[str, Precision, float]] = []
    precisions: tuple[Precision, ...] = ("bfloat16", "float16", "fp8")
    for name, device in DEVICES.items():
        for precision in precisions:
            if precision not in device.flops_per_s or (precision == "float16" and name != "t4"):
                continue
            sizes = _sizes(server.sizes.shape, precision, server.engine)
            other = Server(sizes, device, server.engine, server.memory_share)
            if (batch := other.largest_batch(work.length) // 2) >= 1:
                found.append((name, precision, other.steady_rate(work, batch)))
    return tuple(sorted(found, key=lambda each: -each[2]))


def batching_yaml(plan: Plan) -> str:
    """The file, with the reason for each value."""
    step = plan.server.engine.step_tokens
    lines = [
        "strategy: continuous",
        "  # why: outputs end at different times, and the next step takes a place that is free",
        f"max_num_seqs: {plan.batch}",
        f"  # why: {plan.binds} binds; {plan.largest_batch} sequences of {plan.work.length} tokens "
        f"fit, throughput per time of an answer is best at {plan.knee}",
        f"token_budget: {step}",
        "  # why: the engine's own; a larger one lets prompts delay streams for longer",
        f"max_model_len: {plan.work.length}",
        f"  # why: {plan.work.isl} tokens of prompt and {plan.work.osl} of output were asked for",
    ]
    if plan.goal.itl_s is not None:
        lines += [
            "lanes:",
            "  interactive:",
            f"    itl_target_ms: {1000 * plan.goal.itl_s:g}",
            "      # why: the time between tokens that was asked for",
        ]
    return "\n".join(lines) + "\n"
