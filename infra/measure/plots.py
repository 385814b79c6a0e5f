"""Plots runs under load, comparisons of strategies, and fits of cascades."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from infra.measure.cascade_fit import Fit
from infra.measure.load import Call, LoadRun, Outcome

COLUMNS = ("p50", "p99", "p99.9")
LATENCIES = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
_OUTCOME_COLOURS = {
    Outcome.SUCCEEDED: "#2a9d5c",
    Outcome.SHED: "#e0a030",
    Outcome.CANCELLED: "#8888a0",
    Outcome.FAILED: "#c03030",
}
_LEGEND_COLUMNS = 8
_MOST_CHARS = 30  # of names side by side below the bars
_STRATEGY_COLOURS = ("#8a8f9a", "#6a9fd0", "#2a9d5c", "#e0a030", "#c06090", "#806040")
_CURVE, _TARGET, _CHOSEN = "#2a9d5c", "#8a8f9a", "#c03030"


def draw_runs(runs: Sequence[LoadRun], summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots three rows: latency over throughput, distributions, calls over time. Raises OSError,
    and ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10.5), layout="constrained")
    parts: Any = figure.subfigures(3, 1)
    _draw_curves(parts[0].subplots(1, 3), summaries)
    _draw_distributions(parts[1].subplots(1, 3), runs)
    shown = sorted({0, (len(runs) - 1) // 2, len(runs) - 1})  # first, middle and last
    timelines = parts[2].subplots(1, len(shown), squeeze=False)[0]
    for axes, index in zip(timelines, shown, strict=True):
        _draw_timeline(axes, runs[index], runs[index].load.name)
    for part in parts:
        _explain_row(part)
    figure.savefig(path, dpi=110)


def _explain_row(part: Any) -> None:
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
    names = [found["load"] for found in summaries]
    for outcome, colour in _OUTCOME_COLOURS.items():
        heights = [found[f"num_{outcome}"] for found in summaries]
        bars.bar(range(len(names)), heights, bottom=bottom, color=colour, label=outcome)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    bars.set(title="outcomes of the requests", xlabel="load", ylabel="requests")
    angle = {"rotation": 45, "ha": "right"} if len("".join(names)) > _MOST_CHARS else {}
    bars.set_xticks(range(len(names)), names, **angle)


def _draw_distributions(panels: Any, runs: Sequence[LoadRun]) -> None:
    titles = ("first token, from arrival", "between tokens", "whole answer, from arrival")
    for axes, title, index in zip(panels, titles, range(3), strict=True):
        for run in runs:
            good = [call for call in run.calls if call.outcome is Outcome.SUCCEEDED]
            values = sorted(1000 * v for call in good for v in _latencies(call)[index])
            shares = [(i + 1) / len(values) for i in range(len(values))]
            if values:
                axes.plot(values, shares, label=run.load.name, drawstyle="steps-post")
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
            axes.plot(
                ends, [0] * len(ends), "|", ms=14, color=_OUTCOME_COLOURS[outcome], label=outcome
            )
    axes.set(title=f"calls at {name}", xlabel="seconds", ylabel="calls")
    axes.yaxis.get_major_locator().set_params(integer=True)


def draw_comparison(found: dict[str, Any], path: Path) -> None:
    """Plots medians over rounds, and throughput of each round as dots. Raises OSError, and
    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    is_alone = not found["latency"]
    figure = Figure(figsize=(4.5, 4.2) if is_alone else (13, 4.8), layout="constrained")
    panels: Any = figure.subplots(1, 1 if is_alone else 4, squeeze=False)[0]
    names = list(found["throughput"])
    colours = {name: _STRATEGY_COLOURS[i % len(_STRATEGY_COLOURS)] for i, name in enumerate(names)}
    _draw_throughput(panels[0], found["throughput"], colours)
    if not is_alone:
        for axes, (key, text) in zip(panels[1:], LATENCIES.items(), strict=True):
            _draw_latency(axes, found["latency"], key, colours)
            axes.set(title=f"{text}, ms", xlabel="load, of the best throughput")
        handles, labels = panels[1].get_legend_handles_labels()
        title = "latency: disc p50, dash p99, dot p99.9"
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names), title=title)
    figure.savefig(path, dpi=110)


def _draw_throughput(axes: Any, throughput: dict[str, Any], colours: dict[str, str]) -> None:
    values = [one["output_tokens_per_s"] for one in throughput.values()]
    names = [name.replace(", ", ",\n") for name in throughput]
    bars = axes.bar(names, values, color=[colours[name] for name in throughput])
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], label_type="center")
    for x, one in enumerate(throughput.values()):
        rounds = one["rounds_output_tokens_per_s"]
        axes.plot([x] * len(rounds), rounds, ".", color="black", ms=3)
    axes.set(title="output tokens/s, all at once")


def _draw_latency(
    axes: Any, latency: list[dict[str, Any]], key: str, colours: dict[str, str]
) -> None:
    width = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        places = [x + (i - (len(colours) - 1) / 2) * width for x in range(len(latency))]
        p50, p99, p999 = (
            [1000 * (at["strategies"][name][key][column] or 0.0) for at in latency]
            for column in COLUMNS
        )
        axes.vlines(places, p50, p999, color=colour, lw=2)
        axes.plot(places, p50, "o", color=colour, ms=9, label=name)
        axes.plot(places, p99, "_", color=colour, ms=12, mew=2)
        axes.plot(places, p999, ".", color=colour, ms=7)
    axes.set_xticks(range(len(latency)), [f"{at['load']:.0%}" for at in latency])
    axes.set_xlim(-0.5, max(0.5, len(latency) - 0.5))
    axes.grid(axis="y", lw=0.4)
    logarithmic(axes, "y")


def draw_fit(fit: Fit, target: float, path: Path) -> None:
    """Plots a fit. Raises OSError, and ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    _draw_costs(panels[0], fit, target)
    _draw_thresholds(panels[1], fit, target)
    figure.savefig(path, dpi=110)


def _draw_costs(axes: Any, fit: Fit, target: float) -> None:
    axes.plot(
        [100 * point.cost for point in fit.curve],
        [100 * point.quality for point in fit.curve],
        color=_CURVE,
        label="each threshold",
    )
    first = fit.curve[-1]
    axes.plot(100 * first.cost, 100 * first.quality, "ko", label="first member alone")
    axes.plot(100, 100, "ks", label="last member alone")
    _draw_target(axes, target)
    if fit.chosen is not None and fit.quality_interval is not None:
        x, y = 100 * fit.chosen.cost, 100 * fit.chosen.quality
        low, high = 100 * fit.quality_interval.low, 100 * fit.quality_interval.high
        axes.errorbar(x, y, [[y - low], [high - y]], fmt="D", color=_CHOSEN, capsize=4,
                      label=f"threshold {fit.chosen.threshold:.4g}, 95 % interval")  # fmt: skip
    axes.set(xlabel="cost, % of the last member's", ylabel="quality, % of the last member's")
    axes.margins(0.08)
    axes.grid(lw=0.4)
    _explain(axes)


def _draw_thresholds(axes: Any, fit: Fit, target: float) -> None:
    """Plots over the number of nines of a threshold, because answers are often that sure."""
    places = [_nines(point.threshold) for point in fit.curve]
    axes.step(places, [100 * point.first_share for point in fit.curve], where="pre",
              color="#6a9fd0", label="answered by the first member, %")  # fmt: skip
    axes.step(places, [100 * point.quality for point in fit.curve], where="pre",
              color=_CURVE, label="quality, % of the last member's")  # fmt: skip
    _draw_target(axes, target)
    if fit.chosen is not None:
        axes.axvline(_nines(fit.chosen.threshold), color=_CHOSEN, lw=1)
    ticks = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999]
    shown = [tick for tick in ticks if _nines(tick) <= max(places)]
    axes.set_xticks([_nines(tick) for tick in shown], [f"{tick:g}" for tick in shown])
    axes.set(xlabel="threshold of confidence")
    axes.grid(lw=0.4)
    _explain(axes)


def _explain(axes: Any) -> None:
    """Puts a legend below the panel, where it covers nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)


def _nines(threshold: float) -> float:
    return -math.log10(max(1 - threshold, 1e-6))


def _draw_target(axes: Any, target: float) -> None:
    axes.axhline(100 * target, color=_TARGET, ls="--", lw=1, label=f"target {target:.0%}")
