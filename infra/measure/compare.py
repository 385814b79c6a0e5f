"""`batchway compare`: runs one workload through one model with several batching strategies, in
alternation.

Each run has its own engine and so an empty prefix cache; the model is loaded once.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from infra.measure.engine import EngineRun, RequestFailed, run_workload, warm_up
from infra.measure.plots import COLUMNS, LATENCIES, draw_comparison
from infra.measure.workloads import (
    BadWorkload,
    Workload,
    arriving,
    chosen_workload,
    draw_arrivals,
)
from infra.tables import progress_line, spread, table, write
from workers import configuration
from workers.configuration import ConfigurationError
from workers.engine.engine import Engine
from workers.engine.interface import ModelRefused
from workers.engine.sequence import RequestRefused
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, StrategyOptions
from workers.model.gguf_cache import made_folder
from workers.model.loader import load_model

_GIB = 2**30


def run(options: argparse.Namespace) -> int:
    """Measures, prints, writes; returns 1 if answers differ."""
    try:
        base = _base_options(options)
        ways = _ways(options, base)
        loaded = load_model(base, lambda text: print(text, file=sys.stderr))
        trials = compare(
            {
                name: partial(build_engine, loaded.model, loaded.vocab_size, way)
                for name, way in ways
            },
            make_workload(options, loaded.vocab_size),
            loaded.vocab_size,
            loads=options.load,
            num_rounds=options.rounds,
            seed=options.seed,
            progress=progress_line("runs"),
        )
    except (
        BadWorkload, ConfigurationError, ModelRefused, RequestFailed, RequestRefused,
    ) as exc:  # fmt: skip
        print(f"batchway compare: {exc}", file=sys.stderr)
        return 1
    return report(
        {"model": options.model, "seed": options.seed, **summarise_trials(trials)}, options
    )


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    write(found, comparison_tables(found), options.json)
    if options.png is not None:
        draw_comparison(found, options.png)
    return 0 if found["is_alike"] else 1


def make_workload(options: argparse.Namespace, vocab_size: int) -> Workload:
    """Returns the workload. Raises BadWorkload. Ignores a file's arrival times: loads are drawn."""
    workload = chosen_workload(options, vocab_size, options.seed)
    return arriving(workload, [0.0] * len(workload.requests))


def _base_options(options: argparse.Namespace) -> EngineOptions:
    memory = options.kv_cache_gib and int(options.kv_cache_gib * _GIB)
    return EngineOptions(
        model_path=made_folder(options.model, options.dtype),
        dtype=options.dtype,
        kv_memory_bytes=memory,
        max_num_seqs=options.max_running,
        num_threads=options.threads,
    )


def _ways(options: argparse.Namespace, base: EngineOptions) -> Sequence[tuple[str, EngineOptions]]:
    """Returns name and options of each strategy or file. Raises ConfigurationError."""
    ways = []
    for name in ("static", "dynamic", "continuous"):
        is_padded = not options.flat and name != "continuous"
        strategy = StrategyOptions(
            name=name,
            batch_size=options.max_running,
            padded=is_padded,
        )
        shown = f"{name}, padded" if is_padded else name
        ways.append((shown, msgspec.structs.replace(base, strategy=strategy)))
    ways += [(path.stem, configuration.load(path).apply(base)) for path in options.config]
    return ways


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `load` is a share of the best throughput; None: all requests at once."""

    candidate: str
    number: int  # of the round
    load: float | None
    rate_per_s: float | None
    run: EngineRun


def compare(
    candidates: Mapping[str, Callable[[], Engine]],
    workload: Workload,
    vocab_size: int,
    *,
    loads: Sequence[float],
    num_rounds: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> list[Trial]:
    """Returns all trials of all rounds: first all requests at once, then Poisson arrivals at each
    load. `candidates` create fresh engines.

    Loads are shares of the best request rate of any candidate in the first round. Raises
    RequestFailed, RequestRefused.
    """
    trials: list[Trial] = []
    num_all = num_rounds * len(candidates) * (1 + len(loads))
    num_requests, names = len(workload.requests), list(candidates)

    def run_all(number: int, load: float | None, rate_per_s: float | None) -> None:
        timed = workload
        if rate_per_s is not None:
            drawn = f"{seed} {number} {load:g}"
            arrivals = draw_arrivals(num_requests, rate_per_s, "poisson", 1.0, drawn)
            timed = arriving(workload, arrivals)
        start = number % len(names)  # in turns, so that disturbances affect all alike
        for name in (*names[start:], *names[:start]):
            engine = candidates[name]()
            warm_up(engine, timed, vocab_size)
            trials.append(Trial(name, number, load, rate_per_s, run_workload(engine, timed)))
            progress(len(trials), num_all)

    for number in range(num_rounds):
        run_all(number, None, None)
        best_per_s = max(num_requests / trial.run.wall_s for trial in trials[: len(names)])
        for load in loads:
            run_all(number, load, load * best_per_s)
    return trials


def count_different(trials: Sequence[Trial]) -> dict[str, int]:
    """Returns by candidate how many answers differ from the first trial's."""
    expected = [timeline.token_ids for timeline in trials[0].run.timelines]
    unlike: dict[str, int] = {}
    for trial in trials:
        found = [timeline.token_ids for timeline in trial.run.timelines]
        num = sum(a != b for a, b in zip(expected, found, strict=True))
        unlike[trial.candidate] = unlike.get(trial.candidate, 0) + num
    return unlike


def summarise_trials(trials: Sequence[Trial]) -> dict[str, Any]:
    """`throughput` by candidate with all requests at once; `latency` by load and candidate:
    medians over rounds of each percentile, with each round's figures."""
    names = list(dict.fromkeys(trial.candidate for trial in trials))
    loads = list(dict.fromkeys(trial.load for trial in trials if trial.load is not None))
    unlike = count_different(trials)
    return {
        "num_rounds": 1 + max(trial.number for trial in trials),
        "num_requests": len(trials[0].run.timelines),
        "num_output_tokens": trials[0].run.num_output_tokens,
        "throughput": {
            name: _throughput([t.run for t in trials if t.candidate == name and t.load is None])
            for name in names
        },
        "latency": [_latency(trials, load, names) for load in loads],
        "unlike_answers": unlike,
        "is_alike": not any(unlike.values()),
    }


def _throughput(runs: Sequence[EngineRun]) -> dict[str, Any]:
    rates = [run.output_tokens_per_s for run in runs]
    return {
        "output_tokens_per_s": statistics.median(rates),
        "requests_per_s": statistics.median(len(run.timelines) / run.wall_s for run in runs),
        "wall_s": statistics.median(run.wall_s for run in runs),
        "num_steps": statistics.median(run.num_steps for run in runs),
        "tokens_per_step": statistics.median(run.num_output_tokens / run.num_steps for run in runs),
        "rounds_output_tokens_per_s": rates,
    }


def _latency(trials: Sequence[Trial], load: float, names: Sequence[str]) -> dict[str, Any]:
    at_load = [trial for trial in trials if trial.load == load]
    by_name = {name: _medians([t.run for t in at_load if t.candidate == name]) for name in names}
    rates = [trial.rate_per_s for trial in at_load if trial.rate_per_s is not None]
    return {"load": load, "rate_per_s": statistics.median(rates), "strategies": by_name}


def _medians(runs: Sequence[EngineRun]) -> dict[str, Any]:
    found = {name: [spread(_values(run, name)) for run in runs] for name in LATENCIES}
    medians: dict[str, Any] = {
        name: {column: _median([one[column] for one in spreads]) for column in COLUMNS}
        for name, spreads in found.items()
    }
    return medians | {"rounds": found}


def _values(run: EngineRun, latency: str) -> list[float]:
    if latency == "itl_s":
        return [itl for timeline in run.timelines for itl in timeline.itls_s]
    return [getattr(timeline, latency) for timeline in run.timelines]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def comparison_tables(found: dict[str, Any]) -> str:
    """Returns tables of throughput, of latencies at each load, and of differing answers."""
    best = max(one["output_tokens_per_s"] for one in found["throughput"].values())
    rows: list[Sequence[str]] = [
        ("all at once", "output tokens/s", "of the best", "requests/s", "steps", "tokens a step")
    ]
    rows += [
        (
            name,
            f"{one['output_tokens_per_s']:,.0f}",
            f"{one['output_tokens_per_s'] / best:.0%}",
            f"{one['requests_per_s']:.1f}",
            f"{one['num_steps']:.0f}",
            f"{one['tokens_per_step']:.1f}",
        )
        for name, one in found["throughput"].items()
    ]
    parts = [table(rows), *map(_latency_table, found["latency"])]
    unlike = {name: num for name, num in found["unlike_answers"].items() if num}
    if unlike:
        counts = ", ".join(f"{name} {num}" for name, num in unlike.items())
        parts.append(f"answers that differ from the first run's: {counts}")
    else:
        parts.append(f"all answers have the same tokens in all {found['num_rounds']} rounds")
    return "\n\n".join(parts)


def _latency_table(at: dict[str, Any]) -> str:
    head = f"{at['load']:.0%} load, {at['rate_per_s']:.1f} requests/s"
    columns = " / ".join(COLUMNS)
    rows: list[Sequence[str]] = [(head, *(f"{text}: {columns}" for text in LATENCIES.values()))]
    for name, one in at["strategies"].items():
        rows.append((name, *(_cell(one[latency]) for latency in LATENCIES)))
    return f"latency, ms\n{table(rows)}"


def _cell(one: dict[str, float | None]) -> str:
    values = [one[column] for column in COLUMNS]
    return " / ".join("-" if value is None else f"{1000 * value:,.0f}" for value in values)
