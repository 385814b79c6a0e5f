"""Summarises a comparison: medians over rounds; throughput and latencies separately."""

import statistics
from collections.abc import Sequence
from typing import Any

from infra.measure.compare import Trial, count_different
from infra.measure.engine import EngineRun
from infra.tables import spread, table

COLUMNS = ("p50", "p99", "p99.9")
LATENCIES = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}


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
