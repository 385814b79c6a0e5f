"""Static, dynamic or continuous batching for a workload, and why.

Static batching starts when a batch is full and ends when its last output does; dynamic batching
also starts after a while; continuous batching fills a place as soon as an output ends. So what
decides is how many calls there are at a time, how unequal their outputs are, how they arrive, and
whether anybody waits for a first token.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import msgspec

from infra.planning.calibration import simulate
from infra.planning.outcome import Goal
from infra.planning.plan import each_strategy
from infra.planning.traces import Arrival
from infra.planning.worker import Fleet
from workers.ipc.messages import StrategyName

_EQUAL = 0.1  # coefficient of variation of outputs, up to which they are alike
_ALONE = 1.5  # calls at a time, up to which there is no batch
_AT_ONCE_S = 1.0  # all arrivals are within so long
_BURSTY = 1.5  # coefficient of variation of the gaps; Poisson arrivals have 1


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides. `at_a_time`: calls, on average; `gap_spread`, `output_spread`: coefficients of
    variation."""

    at_a_time: float
    is_at_once: bool
    gap_spread: float
    output_spread: float
    wants_first_token: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """The strategy and the reasons, each a sentence."""

    strategy: StrategyName
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """A strategy in a simulation. Seconds."""

    strategy: StrategyName
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_p50_s: float


def traits_of(arrivals: Seq[Arrival], answer_s: float, goal: Goal) -> Traits:
    """`answer_s`: what an answer takes alone, on average."""
    times = [arrival.arrival_s for arrival in arrivals]
    span_s = times[-1] - times[0]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return Traits(
        at_a_time=len(times) * answer_s / span_s if span_s > 0 else float(len(times)),
        is_at_once=span_s <= _AT_ONCE_S,
        gap_spread=_spread(gaps),
        output_spread=_spread([float(arrival.output_tokens) for arrival in arrivals]),
        wants_first_token=goal.ttft_s is not None or goal.itl_s is not None,
    )


def _spread(values: Seq[float]) -> float:
    mean = statistics.fmean(values) if values else 0.0
    return statistics.pstdev(values) / mean if mean else 0.0


def advise(traits: Traits) -> Advice:
    """Which strategy, from what decides alone."""
    calls = f"{traits.at_a_time:.1f} calls are there at a time"
    if not traits.is_at_once and traits.at_a_time <= _ALONE:
        return Advice(
            "continuous",
            (f"{calls}: there is next to nothing to batch, and any waiting for it is lost",),
        )
    unequal = f"outputs differ by {traits.output_spread:.0%} of their mean"
    if traits.output_spread > _EQUAL:
        reasons = [f"{calls}, and {unequal}: a fixed batch would keep places empty to its end"]
        if traits.wants_first_token:
            reasons.append("somebody waits for a first token: a fixed batch makes newcomers wait")
        if traits.gap_spread > _BURSTY:
            reasons.append("calls come in bursts: a fixed batch is late for the second of two")
        return Advice("continuous", tuple(reasons))
    alike = f"outputs are alike ({traits.output_spread:.0%} of their mean)"
    if traits.is_at_once and not traits.wants_first_token:
        return Advice(
            "static",
            (f"all calls are there at the start and {alike}: whole batches lose nothing, and are "
             "simple to reason about",),
        )  # fmt: skip
    if traits.wants_first_token:
        return Advice(
            "continuous",
            (f"{calls} and {alike}, but a first token is waited for: nobody waits for a batch",),
        )
    return Advice(
        "dynamic",
        (f"{calls}, {alike} and nobody waits for a first token: batches gather for a moment and "
         "end together",),
    )  # fmt: skip


def tried(fleet: Fleet, arrivals: Iterable[Arrival], traits: Traits) -> list[Tried]:
    """Simulates all strategies with the workload; batches are as large as calls are at a time."""
    requests, found = list(arrivals), []
    size = max(2, min(fleet.options.num_places, math.ceil(traits.at_a_time)))
    for name, strategy in each_strategy(size).items():
        options = msgspec.structs.replace(fleet.options, strategy=strategy)
        seen = simulate(replace(fleet, options=options), requests).as_dict()
        first, answer = seen["ttft_s"], seen["e2e_s"]
        rate = seen["output_tokens_per_s"]
        found.append(Tried(name, rate, first["p50"], first["p99"], answer["p50"]))
    return found
