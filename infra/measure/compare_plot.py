"""Plots a comparison: throughput on the left, latencies by load beside it."""

from pathlib import Path
from typing import Any

from infra.measure.compare_report import COLUMNS, LATENCIES
from infra.measure.serve_plot import logarithmic

_COLOURS = ("#8a8f9a", "#6a9fd0", "#2a9d5c", "#e0a030", "#c06090", "#806040")


def draw_comparison(found: dict[str, Any], path: Path) -> None:
    """Plots medians over rounds, and throughput of each round as dots. Raises OSError, and
    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    is_alone = not found["latency"]
    figure = Figure(figsize=(4.5, 4.2) if is_alone else (13, 4.8), layout="constrained")
    panels: Any = figure.subplots(1, 1 if is_alone else 4, squeeze=False)[0]
    names = list(found["throughput"])
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
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
