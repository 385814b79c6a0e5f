"""The workers of a model and the rates at which they drain its lanes: contract/lua/_pools.lua in
Python.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from contract.function_types import WorkerCapacity
from contract.functions import UNKNOWN_MS

WORKER_TTL_MS = 15_000
WINDOW_MS = 10_000
LEAST_SHARE = 0.05  # of the rate, predicted for a lane without a share under a flood


@dataclass(slots=True)
class Use:
    """Tokens of a lane's jobs handed out in the current window and the one before."""

    window: int = 0
    num_tokens: int = 0
    num_before: int = 0

    def note(self, num_tokens: int, now_ms: int) -> None:
        self._roll(now_ms)
        self.num_tokens += num_tokens

    def per_s(self, now_ms: int) -> float:
        """The rate over the last ten seconds, as if the earlier window had been uniform."""
        self._roll(now_ms)
        before = self.num_before * (WINDOW_MS - now_ms % WINDOW_MS) / WINDOW_MS
        return (self.num_tokens + before) * 1000 / WINDOW_MS

    def _roll(self, now_ms: int) -> None:
        num_passed = now_ms // WINDOW_MS - self.window
        if num_passed > 0:
            self.num_before = self.num_tokens if num_passed == 1 else 0
            self.num_tokens = 0
        self.window = now_ms // WINDOW_MS


@dataclass(frozen=True, slots=True)
class LaneRates:
    """The rates available to a lane, in tokens per second of jobs' costs.

    `left` is for it and all that goes before it; `own`, its guaranteed rate, waits for no other
    lane.
    """

    left: float
    own: float

    @property
    def most(self) -> float:
        return max(self.left, self.own)


@dataclass(slots=True)
class Pool:
    """The workers of a model: the average rate and capacity of one, and the number of live ones.

    `shares` are the minimum shares of lanes, `used` the tokens handed out in each.
    """

    means: dict[str, float] = field(default_factory=dict)
    lanes: tuple[str, ...] = ()  # most urgent first
    shares: dict[str, float] = field(default_factory=dict)
    used: dict[str, Use] = field(default_factory=dict)
    num_live: int = 0
    now_ms: int = 0

    def measure(self, live: Sequence[WorkerCapacity]) -> None:
        """The mean over live workers with a measurement; without any, the former value is kept."""
        for name in ("tokens_per_s", "stream_tokens_per_s", "max_tokens", "max_jobs"):
            known = [value for worker in live if (value := getattr(worker, name)) > 0]
            if known:
                self.means[name] = sum(known) / len(known)

    def mean(self, name: str) -> float:
        return self.means.get(name, 0.0)

    @property
    def rate(self) -> float:
        """Tokens per second of all live workers, or of one if none is live."""
        return self.mean("tokens_per_s") * max(1, self.num_live)

    def count_on(
        self, lane: str, before: Sequence[str], after_with_work: Sequence[str]
    ) -> LaneRates:
        """The lane's rates, after the recent use of the lanes before it and the shares of the
        others."""
        used, kept = 0.0, 0.0  # added up one by one, as in Redis: sum() rounds otherwise
        for name in before:
            used += self.used.get(name, Use()).per_s(self.now_ms)
        for name in after_with_work:
            kept += self.shares.get(name, 0.0)
        left = max(self.rate * (1 - kept) - used, LEAST_SHARE * self.rate)
        return LaneRates(left, self.shares.get(lane, 0.0) * self.rate)

    def service_ms(self, num_output: int, num_choices: int) -> int:
        """How long a job runs; 0 if unknown, so that no job is refused for it."""
        rate = self.mean("stream_tokens_per_s")
        return math.ceil(num_output * 1000 / num_choices / rate) if rate else 0

    def knows(self, lane: str) -> bool:
        return not self.lanes or lane in self.lanes


def drain_ms(rate: float, num_tokens: float) -> int:
    """The time until this many tokens are drained at this rate per second."""
    return math.ceil(num_tokens * 1000 / rate) if rate else UNKNOWN_MS
