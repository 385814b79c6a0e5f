"""Percentiles, in plain Python: adapters of other engines use it in their own environments."""

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "p99.9": percentile(values, 0.999),
        "max": max(values, default=None),
    }
