"""Plots runs under load: latency over throughput, distributions and timelines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from infra.measure.http_calls import Call, Outcome
from infra.measure.load import LoadRun
from infra.measure.serve_report import load_name

_COLOURS = {
    Outcome.SUCCEEDED: "#2a9d5c",
    Outcome.SHED: "#e0a030",
    Outcome.CANCELLED: "#8888a0",
    Outcome.FAILED: "#c03030",
}
_LEGEND_COLUMNS = 8
_MOST_CHARS = 30  # of names side by side below the bars


def draw_runs(runs: Sequence[LoadRun], summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots three rows: latency over throughput, distributions, calls over time. Raises OSError,
    and ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10.5), layout="constrained")
    parts: Any = figure.subfigures(3, 1)
    _draw_curves(parts[0].subplots(1, 3), summaries)
    _draw_distributions(parts[1].subplots(1, 3), runs, summaries)
    shown = _timelines(len(runs))
    timelines = parts[2].subplots(1, len(shown), squeeze=False)[0]
    for axes, index in zip(timelines, shown, strict=True):
        _draw_timeline(axes, runs[index], load_name(summaries[index]))
    for part in parts:
        _explain(part)
    figure.savefig(path, dpi=110)


def _explain(part: Any) -> None:
    """Puts one legend below all panels of a row, so that it covers none."""
    found = [axes.get_legend_handles_labels() for axes in part.axes]
    handles = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    if handles:
        columns = min(len(handles), _LEGEND_COLUMNS)
        part.legend(handles.values(), handles, loc="outside lower center", ncols=columns)


def logarithmic(axes: Any, which: Literal["x", "y"]) -> None:
    """Makes an axis logarithmic with ticks at 1, 2, 5, 10; over three decades at 1, 10."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _timelines(num_runs: int) -> list[int]:
    """The indices of at most three runs: the first, the middle and the last."""
    return sorted({0, (num_runs - 1) // 2, num_runs - 1})


def _draw_curves(panels: Any, summaries: Sequence[dict[str, Any]]) -> None:
    throughput = [found["requests_per_s"] for found in summaries]
    titles = {"ttft_s": "first token, from arrival", "itl_s": "between tokens"}
    for axes, (key, title) in zip(panels, titles.items(), strict=False):
        for column, marker in (("p50", "o"), ("p99", "s")):
            values = [found[key][column] for found in summaries]
            points = [(x, 1000 * y) for x, y in zip(throughput, values, strict=True) if y]
            if points:  # none if no call was answered
                axes.plot(*zip(*points, strict=True), marker=marker, label=column)
        axes.set(title=title, xlabel="answers per second", ylabel="ms")
        if axes.lines:
            logarithmic(axes, "y")
    bars, bottom = panels[2], [0] * len(summaries)
    names = [load_name(found) for found in summaries]
    for outcome, colour in _COLOURS.items():
        heights = [found[f"num_{outcome}"] for found in summaries]
        bars.bar(range(len(names)), heights, bottom=bottom, color=colour, label=outcome)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    bars.set(title="outcomes of the requests", xlabel="load", ylabel="requests")
    angle = {"rotation": 45, "ha": "right"} if len("".join(names)) > _MOST_CHARS else {}
    bars.set_xticks(range(len(names)), names, **angle)


def _draw_distributions(
    panels: Any, runs: Sequence[LoadRun], summaries: Sequence[dict[str, Any]]
) -> None:
    titles = ("first token, from arrival", "between tokens", "whole answer, from arrival")
    for axes, title, index in zip(panels, titles, range(3), strict=True):
        for run, found in zip(runs, summaries, strict=True):
            good = [call for call in run.calls if call.outcome is Outcome.SUCCEEDED]
            values = sorted(1000 * v for call in good for v in _latencies(call)[index])
            shares = [(i + 1) / len(values) for i in range(len(values))]
            if values:
                axes.plot(values, shares, label=load_name(found), drawstyle="steps-post")
        axes.set(title=title, xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
        if axes.lines:
            logarithmic(axes, "x")


def _latencies(call: Call) -> tuple[list[float], list[float], list[float]]:
    ttft_s = call.ttft_s
    return ([] if ttft_s is None else [ttft_s], call.itls_s, [call.e2e_s])


def _draw_timeline(axes: Any, run: LoadRun, name: str) -> None:
    """Plots concurrent calls over time, and when unsuccessful ones ended."""
    changes = sorted([(c.sent_s, 1) for c in run.calls] + [(c.end_s, -1) for c in run.calls])
    times, num_running, running = [0.0], [0], 0
    for at_s, change in changes:
        running += change
        times.append(at_s)
        num_running.append(running)
    axes.step(times, num_running, where="post", color="#3060a0", label="running")
    for outcome in (Outcome.SHED, Outcome.CANCELLED, Outcome.FAILED):
        ends = [call.end_s for call in run.calls if call.outcome is outcome]
        if ends:
            axes.plot(ends, [0] * len(ends), "|", ms=14, color=_COLOURS[outcome], label=outcome)
    axes.set(title=f"calls at {name}", xlabel="seconds", ylabel="calls")
    axes.yaxis.get_major_locator().set_params(integer=True)
