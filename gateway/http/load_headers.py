"""Response headers about load: Retry-After, rate limits, Server-Timing."""

import math
import time
from collections.abc import Callable

from contract.errors import RateLimits

JITTER = 0.25  # share of the wait; at least a second. Callers must not all return at once.


def retry_after(retry_s: float, draw: Callable[[], float]) -> str:
    """Whole seconds, rounded up, plus jitter. `draw` returns random numbers from 0 to 1."""
    least = max(1, math.ceil(retry_s))
    return str(least + int(draw() * (1 + math.ceil(JITTER * least))))


def rate_headers(rates: RateLimits | None) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` of the limits that exist."""
    headers: dict[str, str] = {}
    for what in ("requests", "tokens"):
        rate = getattr(rates, what, None)
        if rate is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{what}"] = f"{math.ceil(rate.reset_s)}s"
    return headers


class ServerTiming:
    """Times of one request in ms from its start, for the header `Server-Timing`."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Records the time of a phase, once."""
        self._marks.setdefault(name, 1000 * (time.monotonic() - self._started_s))

    def headers(self) -> dict[str, str]:
        if not self._marks:
            return {}
        parts = [f"{name};dur={ms:.1f}" for name, ms in self._marks.items()]
        return {"server-timing": ", ".join(parts)}
