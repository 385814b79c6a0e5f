"""Headers that tell a caller about load: when to come again, what is left of its limits, where the
time of an answer went.
"""

import math
import time
from collections.abc import Callable

from contract.errors import RateLimits

JITTER = 0.25  # of the wait, and a second at least: callers must not come at once


def retry_after(retry_s: float, draw: Callable[[], float]) -> str:
    """Whole seconds, never before the time itself: who comes then is to be let in.

    `draw` gives random numbers from 0 up to 1.
    """
    least = max(1, math.ceil(retry_s))
    return str(least + int(draw() * (1 + math.ceil(JITTER * least))))


def rate_headers(rates: RateLimits | None) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, of the limits that there are."""
    headers: dict[str, str] = {}
    for what in ("requests", "tokens"):
        rate = getattr(rates, what, None)
        if rate is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{what}"] = f"{math.ceil(rate.reset_s)}s"
    return headers


class ServerTiming:
    """Marks of one request, in ms from its start: the header `Server-Timing`."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Notes when something was reached; the first time counts."""
        self._marks.setdefault(name, 1000 * (time.monotonic() - self._started_s))

    def headers(self) -> dict[str, str]:
        if not self._marks:
            return {}
        parts = [f"{name};dur={ms:.1f}" for name, ms in self._marks.items()]
        return {"server-timing": ", ".join(parts)}
