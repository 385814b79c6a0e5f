"""One tenant floods a lane, another calls in it: `python -m tests.overload.tenants --jobs N`.

A stack without settings but with two keys. The light tenant makes calls, one after another: first
alone, later while jobs of the heavy tenant fill every place. In between, the heavy tenant alone
measures its tokens per second. Exit status 1 if a call of the light tenant was rejected or broke.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.api_keys import ApiKeys, KeyTerms
from contract.functions import Functions
from contract.keys import Keys
from infra.tables import percentile
from tests.campaigns.command_line import Progress, parser_of, run, silent
from tests.campaigns.load import Ask, Attempt, Callers, side_by_side
from tests.campaigns.pool import stack_without_settings

_LANE = "standard"
_NUM_POSTERS = 16
_NUM_CALLS_ALONE = 40
_CALL_TOKENS = 16
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class TenantsOptions:
    """`measured_s`: how long each measurement under the flood takes."""

    num_jobs: int = 1200
    job_tokens: int = 900
    measured_s: float = 25.0


@dataclass
class TenantsReport:
    options: TenantsOptions
    jobs: Sequence[Attempt]
    alone: Sequence[Attempt]
    flooded: Sequence[Attempt]
    tokens_per_s: dict[str, float]
    num_displaced: int

    @property
    def violations(self) -> list[str]:
        return [
            f"a call of the light tenant ended with {call.status} {call.reason}"
            for call in (*self.alone, *self.flooded)
            if not call.is_whole
        ]

    def figures(self) -> dict[str, Any]:
        return {
            "jobs taken": sum(call.is_admitted for call in self.jobs),
            "TTFT (s)": {"alone": _seconds(self.alone), "flooded": _seconds(self.flooded)},
            "tokens/s": {name: round(rate, 1) for name, rate in self.tokens_per_s.items()},
            "sequences displaced": self.num_displaced,
        }


async def run_tenants(
    options: TenantsOptions, say: Callable[[str], None] = silent
) -> TenantsReport:
    """Leaves no process behind."""
    async with stack_without_settings() as (url, client):
        made = ApiKeys(client, Keys())
        terms = [KeyTerms(tenant=tenant) for tenant in ("heavy", "light")]
        api_keys = {each.tenant: (await made.create(each))[0] for each in terms}
        callers = Callers([url], "demo", api_keys, timeout_s=_TIMEOUT_S)
        return await _Tenants(options, callers, Functions(client, Keys()), say).run()


@dataclass
class _Tenants:
    options: TenantsOptions
    callers: Callers
    functions: Functions
    say: Callable[[str], None]
    jobs: list[Attempt] = field(default_factory=list)

    async def run(self) -> TenantsReport:
        alone = [await self._call() for _ in range(_NUM_CALLS_ALONE)]
        self.say("the light tenant was alone")
        rest = iter(range(self.options.num_jobs))

        async def post() -> None:
            for _ in rest:
                self.jobs.append(await self._ask("heavy", self.options.job_tokens, is_job=True))

        await side_by_side(*(post() for _ in range(_NUM_POSTERS)))
        self.say(f"{sum(call.is_admitted for call in self.jobs)} jobs were taken")
        rates = {}
        before, started_s = await self._totals(), time.monotonic()
        await asyncio.sleep(self.options.measured_s)
        after, now_s = await self._totals(), time.monotonic()
        rates["heavy alone"] = (after[0] - before[0]) / (now_s - started_s)
        before, started_s = after, now_s
        flooded = []
        while time.monotonic() - started_s < self.options.measured_s:
            flooded.append(await self._call())
            self.say(f"{len(flooded)} calls")
        after, now_s = await self._totals(), time.monotonic()
        rates["both"] = (after[0] - before[0]) / (now_s - started_s)
        num_displaced = after[1] - before[1]
        return TenantsReport(self.options, self.jobs, alone, flooded, rates, num_displaced)

    async def _totals(self) -> tuple[int, int]:
        totals = (await self.functions.snapshot("demo", [])).totals
        num_tokens = totals.get(f"generation_tokens_total:{_LANE}", 0)
        return num_tokens, totals.get("num_preemptions_total", 0)

    async def _call(self) -> Attempt:
        return await self._ask("light", _CALL_TOKENS)

    async def _ask(self, tenant: str, num_tokens: int, *, is_job: bool = False) -> Attempt:
        ask = Ask(tenant, _LANE, "Once upon a time", num_tokens)
        return await self.callers.call(ask, is_job=is_job)


def _seconds(calls: Sequence[Attempt]) -> str:
    ttfts = [s for call in calls if (s := call.ttft_from_sending_s) is not None]
    p50, p99 = (percentile(ttfts, share) for share in (0.5, 0.99))
    if p50 is None or p99 is None:
        return "-"
    return f"p50 {p50:.3f}, p99 {p99:.3f}, longest {max(ttfts):.3f} of {len(ttfts)}"


def main() -> int:
    parser = parser_of("tenants", __doc__)
    parser.add_argument("--jobs", type=int, default=1200, help="of the heavy tenant")
    given = parser.parse_args()
    options = TenantsOptions(given.jobs)
    return run(lambda: run_tenants(options, Progress().say), given.json)


if __name__ == "__main__":
    sys.exit(main())
