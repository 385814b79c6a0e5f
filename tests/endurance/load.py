"""Concurrent callers, each of which makes calls of all kinds, one after another."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import httpx

from tests.campaigns.load import Callers, side_by_side
from tests.endurance.calls import ALL_RIGHTS, CALLS, Caller
from tests.infra.stack import MODEL

NUM_CALLERS = 12
_MIN_CALLS = 3


@dataclass
class Load:
    """`counts` holds the number of calls of each kind; `surprises` the unexpected responses."""

    url: str
    seed: int
    api_keys: Mapping[str, str]  # by tenant
    callback_url: str
    counts: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, duration_s: float) -> None:
        """Lasts at least so long, and until each kind was called three times. Returns once all
        callers have ended and closed their connections."""
        end_s = time.monotonic() + duration_s
        headers = {"authorization": f"Bearer {self.api_keys[ALL_RIGHTS]}"}
        callers = Callers([self.url], MODEL, self.api_keys, self.seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers) as http:
            caller = Caller(callers, http, self.callback_url)
            await side_by_side(*(self._call_on(caller, end_s) for _ in range(NUM_CALLERS)))

    async def _call_on(self, caller: Caller, end_s: float) -> None:
        while time.monotonic() < end_s or min(self.counts[name] for name in CALLS) < _MIN_CALLS:
            number = next(self._numbers)
            rng = random.Random(f"{self.seed} {number}")
            name = self._kind(number)
            try:
                await CALLS[name](caller, rng)
            except (AssertionError, httpx.HTTPError, OSError) as exc:
                self.surprises.append(f"{name}: {type(exc).__name__} {exc}"[:200])
            self.counts[name] += 1

    def _kind(self, number: int) -> str:
        """Each kind once, in a drawn order, then each once again in another."""
        turn, place = divmod(number, len(CALLS))
        return random.Random(f"{self.seed} turn {turn}").sample(list(CALLS), len(CALLS))[place]
