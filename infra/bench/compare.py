"""Runs one workload through one model with several batching strategies, in alternation.

Each run has its own engine and so an empty prefix cache; the model is loaded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.bench.arrivals import draw_arrivals
from infra.bench.engine import EngineRun, run_workload, warm_up
from infra.bench.workloads import Workload, arriving
from workers.engine.engine import Engine

_NUM_WARM_UP = 4  # requests before each run


@dataclass(frozen=True, slots=True)
class Contestant:
    """A batching configuration; `build` creates a fresh engine."""

    name: str
    build: Callable[[], Engine]


@dataclass(frozen=True, slots=True)
class Heat:
    """One run. `load` is a share of the best throughput; None: all requests at once."""

    contestant: str
    number: int  # of the round
    load: float | None
    rate_per_s: float | None
    run: EngineRun


def compare(
    contestants: Sequence[Contestant],
    workload: Workload,
    vocab_size: int,
    *,
    loads: Sequence[float],
    num_rounds: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> list[Heat]:
    """All heats of all rounds: first all requests at once, then Poisson arrivals at each load.

    Loads are shares of the best request rate of any contestant in the first round. Raises
    RequestFailed, RequestRefused.
    """
    heats: list[Heat] = []
    num_all = num_rounds * len(contestants) * (1 + len(loads))

    def run_all(number: int, load: float | None, rate_per_s: float | None) -> None:
        asked = workload
        if rate_per_s is not None:
            drawn = f"{seed} {number} {load:g}"
            num_requests = len(workload.requests)
            asked = arriving(
                workload, draw_arrivals(num_requests, rate_per_s, "poisson", 1.0, drawn)
            )
        for contestant in _in_turns(contestants, number):
            heats.append(
                Heat(contestant.name, number, load, rate_per_s, _run(contestant, asked, vocab_size))
            )
            progress(len(heats), num_all)

    for number in range(num_rounds):
        run_all(number, None, None)
        best_per_s = max(
            len(workload.requests) / heat.run.wall_s for heat in heats[: len(contestants)]
        )
        for load in loads:
            run_all(number, load, load * best_per_s)
    return heats


def _run(contestant: Contestant, asked: Workload, vocab_size: int) -> EngineRun:
    engine = contestant.build()
    lengths = [len(request.prompt_token_ids) for request in asked.requests[:_NUM_WARM_UP]]
    warm_up(engine, lengths, vocab_size)
    return run_workload(engine, asked)


def _in_turns(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """Rotates the order each round, so that disturbances affect all contestants alike."""
    start = number % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def num_unlike(heats: Sequence[Heat]) -> dict[str, int]:
    """By contestant, how many answers differ from the first heat's."""
    expected = [timeline.token_ids for timeline in heats[0].run.timelines]
    unlike: dict[str, int] = {}
    for heat in heats:
        found = [timeline.token_ids for timeline in heat.run.timelines]
        num = sum(a != b for a, b in zip(expected, found, strict=True))
        unlike[heat.contestant] = unlike.get(heat.contestant, 0) + num
    return unlike
