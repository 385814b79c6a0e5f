"""The resources of a run over time: whether they stay level under a steady load, and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.endurance.footprint import Footprint

_MIN_SAMPLES = 10  # fewer show no trend
_MEMORY, _DESCRIPTORS, _THREADS = "resident MiB", "file descriptors", "threads"
_KEYS, _REDIS = "keys of Redis", "MiB in Redis"
CHILDREN = "gateway's children"
# Growth over a run that is no trend: a number, and a share of the mean.
_SLACK: Mapping[str, tuple[float, float]] = {
    _MEMORY: (8.0, 0.1),
    _DESCRIPTORS: (8.0, 0.1),
    _THREADS: (4.0, 0.0),
    _KEYS: (20.0, 0.1),
    _REDIS: (1.0, 0.1),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """`values`: a figure by quantity and kind of process, sums over its processes."""

    at_s: float
    values: Mapping[str, Mapping[str, float]]

    def row(self) -> dict[str, Any]:
        return {"at_s": round(self.at_s, 1), **self.values}


def sample_of(at_s: float, found: Footprint) -> Sample:
    values: dict[str, dict[str, float]] = {_MEMORY: {}, _DESCRIPTORS: {}, _THREADS: {}}
    for one in found.processes:
        kind = CHILDREN if one.kind.startswith("gateway.") else one.kind
        for quantity, value in (
            (_MEMORY, one.rss_bytes / 2**20),
            (_DESCRIPTORS, one.num_fds),
            (_THREADS, one.num_threads),
        ):
            values[quantity][kind] = round(values[quantity].get(kind, 0.0) + value, 1)
    values[_KEYS] = {"all": len(found.keys)}
    values[_REDIS] = {"used": round(found.redis_bytes / 2**20, 2)}
    return Sample(at_s, values)


def trends(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each quantity that grows: the growth of the fitted line over the run is more
    than the slack."""
    if len(samples) < _MIN_SAMPLES:
        return []
    found = []
    for quantity, curves in _curves(samples).items():
        least, share = _SLACK[quantity]
        for kind, (times, values) in curves.items():
            if kind == CHILDREN:
                continue  # their number changes on a busy machine; `compare` bounds it
            growth = statistics.linear_regression(times, values).slope * (times[-1] - times[0])
            if growth > least + share * statistics.fmean(values):
                found.append(f"{quantity} of {kind} grew by {growth:.1f} under a steady load")
    return found


def draw(samples: Sequence[Sample], load_s: float, path: Path) -> None:
    """One panel for each quantity; a line where the load ended."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 13), layout="constrained")
    panels: Any = figure.subplots(len(_SLACK), 1, sharex=True)
    for axes, (quantity, curves) in zip(panels, _curves(samples).items(), strict=True):
        for number, (kind, (times, values)) in enumerate(curves.items()):
            # The same colours in each panel, of which only the first has a legend.
            axes.plot([at_s / 60 for at_s in times], values, label=kind, color=f"C{number}")
        axes.axvline(load_s / 60, color="#8a8f9a", linestyle="--")
        axes.set(ylabel=quantity)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    panels[-1].set(xlabel="minutes")
    with rc_context({"svg.hashsalt": "batchway"}):
        figure.savefig(path, dpi=110)


def _curves(
    samples: Sequence[Sample],
) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Times and values by quantity and kind. A kind without a process counts as 0."""
    times = [sample.at_s for sample in samples]
    kinds = {name: {k for s in samples for k in s.values[name]} for name in _SLACK}
    return {
        name: {k: (times, [s.values[name].get(k, 0.0) for s in samples]) for k in sorted(found)}
        for name, found in kinds.items()
    }
