"""Plots in which no legend covers what is drawn, and no label another."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from infra.measure.cascade_fit import FirstAnswer, LastAnswer, Measured, fit_threshold
from infra.measure.load import Call, Load, LoadRun, Outcome
from infra.measure.plots import draw_fit, draw_runs
from infra.measure.serve import Slo, summarise_load
from infra.measure.workloads import Workload


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    from matplotlib.figure import Figure

    found: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    return found


def assert_legible(figure: Any) -> None:
    figure.draw_without_rendering()
    parts = [figure, *figure.subfigs]
    panels = figure.axes
    legends = [each for owner in (*parts, *panels) for each in _legends_of(owner)]
    assert legends
    for legend in legends:
        assert not any(legend.get_window_extent().overlaps(axes.bbox) for axes in panels)
    for axes in panels:
        assert not axes.texts
        for axis, is_sideways in ((axes.xaxis, True), (axes.yaxis, False)):
            labels = [each for each in axis.get_ticklabels() if each.get_text()]
            if is_sideways and labels and labels[0].get_rotation():
                continue  # slanted labels stand apart
            low, high = sorted(axis.get_view_interval())
            places = dict(zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False))
            boxes = [each.get_window_extent() for at, each in places.items() if low <= at <= high]
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def _legends_of(owner: Any) -> Sequence[Any]:
    legend = owner.get_legend() if hasattr(owner, "get_legend") else None
    return [*getattr(owner, "legends", ()), *([] if legend is None else [legend])]


def run_of(load: Load, num_calls: int = 40) -> LoadRun:
    """Invented calls of all outcomes, with gaps over four decades."""
    calls = []
    for number in range(num_calls):
        at_s = number / 10
        gap_s = 10.0 ** -(number % 5)
        call = Call(number, 3, at_s, at_s, at_s + 2 * gap_s, Outcome.SUCCEEDED, "", 200)
        if number % 4 == 3:
            call.outcome = list(Outcome)[number // 4 % len(Outcome)]
        call.chunk_times_s, call.num_output_tokens = [at_s + gap_s, at_s + 2 * gap_s], 2
        calls.append(call)
    return LoadRun(load, tuple(calls), num_calls / 10 + 2)


@pytest.mark.parametrize(
    "loads",
    [
        [Load(Workload(()), True, None, rate) for rate in (5.0, 20.0, 60.0)],
        [Load(Workload(()), True, None, 10.0 * rate) for rate in range(1, 13)],
        [Load(Workload(()), False, 4**n) for n in range(6)],
        [Load(Workload(()), True, None, 5.0)] * 2,
    ],
    ids=["three", "twelve", "callers", "twice the same"],
)
def test_a_plot_of_loads_is_legible(loads: list[Load], drawn: list[Any]) -> None:
    """Of few and of many loads; each has a bar of its own."""
    runs = [run_of(load) for load in loads]
    draw_runs(runs, [summarise_load(run, Slo()) for run in runs], Path("unused.png"))
    [figure] = drawn
    assert_legible(figure)
    bars = figure.axes[2]
    assert len({bar.get_x() for bar in bars.patches}) == len(loads)


@pytest.mark.parametrize("first_cost", [0.05, 0.9, 3.0])
def test_a_plot_of_a_cascade_is_legible(first_cost: float, drawn: list[Any]) -> None:
    """Wherever both members stand in it."""
    rows = [
        Measured(
            first=FirstAnswer(confidence=n / 100, quality=float(n % 7 > 1), cost=first_cost),
            last=LastAnswer(quality=float(n % 5 > 0), cost=1.0),
        )
        for n in range(100)
    ]
    draw_fit(fit_threshold(rows, 0.9, seed=1), 0.9, Path("unused.png"))
    assert_legible(drawn[0])
