"""Concurrent callers, each of which makes calls of all kinds, one after another."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from tests.endurance.calls import CALLS, Caller
from tests.endurance.side_by_side import side_by_side

NUM_CALLERS = 12


@dataclass
class Load:
    """`counts` holds the number of calls of each kind; `surprises` the unexpected responses."""

    url: str
    seed: int
    key: str
    limited_key: str
    callback_url: str
    counts: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, duration_s: float) -> None:
        """Returns once all callers have ended and closed their connections."""
        is_over = asyncio.Event()

        async def set_when_over() -> None:
            await asyncio.sleep(duration_s)
            is_over.set()

        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers) as http:
            caller = Caller(http, self.limited_key, self.callback_url)
            callers = [self._call_on(caller, is_over) for _ in range(NUM_CALLERS)]
            await side_by_side(set_when_over(), *callers)

    async def _call_on(self, caller: Caller, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
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
