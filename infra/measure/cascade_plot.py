"""Plots a cascade: quality over cost on the left, what each threshold does on the right."""

import math
from pathlib import Path
from typing import Any

from infra.measure.cascade_fit import Fit

_CURVE, _TARGET, _CHOSEN = "#2a9d5c", "#8a8f9a", "#c03030"


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
    """Converts 0.9 to 1, 0.99 to 2."""
    return -math.log10(max(1 - threshold, 1e-6))


def _draw_target(axes: Any, target: float) -> None:
    axes.axhline(100 * target, color=_TARGET, ls="--", lw=1, label=f"target {target:.0%}")
