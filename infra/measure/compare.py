"""Runs one workload through one model with several batching strategies, in alternation.

Each run has its own engine and so an empty prefix cache; the model is loaded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.measure.arrivals import draw_arrivals
from infra.measure.engine import EngineRun, run_workload, warm_up
from infra.measure.workloads import Workload, arriving
from workers.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batching configuration; `build` creates a fresh engine."""

    name: str
    build: Callable[[], Engine]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `load` is a share of the best throughput; None: all requests at once."""

    candidate: str
    number: int  # of the round
    load: float | None
    rate_per_s: float | None
    run: EngineRun


def compare(
    candidates: Sequence[Candidate],
    workload: Workload,
    vocab_size: int,
    *,
    loads: Sequence[float],
    num_rounds: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> list[Trial]:
    """Returns all trials of all rounds: first all requests at once, then Poisson arrivals at each
    load.

    Loads are shares of the best request rate of any candidate in the first round. Raises
    RequestFailed, RequestRefused.
    """
    trials: list[Trial] = []
    num_all = num_rounds * len(candidates) * (1 + len(loads))

    def run_all(number: int, load: float | None, rate_per_s: float | None) -> None:
        timed = workload
        if rate_per_s is not None:
            drawn = f"{seed} {number} {load:g}"
            num_requests = len(workload.requests)
            timed = arriving(
                workload, draw_arrivals(num_requests, rate_per_s, "poisson", 1.0, drawn)
            )
        for candidate in _in_turns(candidates, number):
            trials.append(
                Trial(
                    candidate.name,
                    number,
                    load,
                    rate_per_s,
                    _run(candidate, timed, vocab_size),
                )
            )
            progress(len(trials), num_all)

    for number in range(num_rounds):
        run_all(number, None, None)
        best_per_s = max(
            len(workload.requests) / trial.run.wall_s for trial in trials[: len(candidates)]
        )
        for load in loads:
            run_all(number, load, load * best_per_s)
    return trials


def _run(candidate: Candidate, timed: Workload, vocab_size: int) -> EngineRun:
    engine = candidate.build()
    warm_up(engine, timed, vocab_size)
    return run_workload(engine, timed)


def _in_turns(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """Rotates the order each round, so that disturbances affect all candidates alike."""
    start = number % len(candidates)
    return [*candidates[start:], *candidates[:start]]


def count_different(trials: Sequence[Trial]) -> dict[str, int]:
    """Returns by candidate how many answers differ from the first trial's."""
    expected = [timeline.token_ids for timeline in trials[0].run.timelines]
    unlike: dict[str, int] = {}
    for trial in trials:
        found = [timeline.token_ids for timeline in trial.run.timelines]
        num = sum(a != b for a, b in zip(expected, found, strict=True))
        unlike[trial.candidate] = unlike.get(trial.candidate, 0) + num
    return unlike
