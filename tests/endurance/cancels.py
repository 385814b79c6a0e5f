"""Cancels at random times, in every state: `python -m tests.endurance.cancels --count N`.

Callers cancel each of their jobs over HTTP, or disconnect from it, at a random time. Afterwards no
worker may hold or run anything, no log may have grown after an acknowledged cancel, no job
cancelled while it waited may have been started, and the output of each job is a prefix of the hash
model's.
"""

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from contract.events import LogEntry
from contract.function_types import JobView
from contract.jobs import JobStatus
from gateway.redis.key_ring import DEFAULT_TENANT
from tests.campaigns.command_line import Progress, parser_of, run, silent
from tests.campaigns.load import Ask, Callers, side_by_side
from tests.campaigns.pool import MODEL, Pool, pool
from tests.fakes import HashModelOptions, expected_output
from tests.fleet import Answer, until
from tests.streams import events_of

STEP_S = 0.02
HASH_MODEL = HashModelOptions(step_s=STEP_S, eos_rate=0.0, num_blocks=256)
# Twelve sequences run at a time and prompts take several steps: of 24 callers half wait.
ENGINE = {"max_num_seqs": 6, "max_num_batched_tokens": 64}
NUM_WORKERS = 2
NUM_CALLERS = 24
MAX_CHOICES = 3
LONGEST_WAIT_S = 1.5


class Way(StrEnum):
    """How a caller ends its job."""

    AT_ONCE = "at once"
    AFTER_A_WHILE = "after a while"
    AT_A_TOKEN = "at a token"
    AT_THE_END = "at the end"
    TWICE = "twice at once"
    STREAM_CLOSED = "stream closed"
    CALL_CLOSED = "call closed"


@dataclass(frozen=True, slots=True)
class Plan:
    """One caller's job and what the caller does to it, drawn from the seed and the job's number."""

    way: Way
    ask: Ask
    wait_s: float
    num_events: int

    @classmethod
    def draw(cls, seed: int, number: int) -> "Plan":
        rng = random.Random(f"{seed} {number}")
        way = rng.choice(list(Way))
        prompt_ids = [rng.randrange(32, 127) for _ in range(rng.choice((4, 20, 200)))]
        num_output = rng.randrange(1, 8) if way is Way.AT_THE_END else rng.randrange(5, 80)
        fields = {"n": rng.choice((1, 1, MAX_CHOICES)), "temperature": rng.choice((0, 1))}
        ask = Ask(DEFAULT_TENANT, "standard", prompt_ids, num_output, {**fields, "seed": number})
        return cls(way, ask, rng.random() ** 2 * LONGEST_WAIT_S, rng.randrange(1, 20))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What was known of a job when its cancel had been acknowledged."""

    view: JobView

    @property
    def met(self) -> str:
        """The state in which the cancel found the job."""
        if self.view.status is not JobStatus.CANCELLED:
            return "ended"
        if self.view.claimed_ms is None:
            return "queued"
        return "streaming" if self.view.num_output_tokens else "claimed"


@dataclass
class CancelReport:
    """`tokens_after_cancel`: tokens that the workers computed for cancelled jobs."""

    seed: int
    ways: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    num_choices_running: int = 0  # of the jobs that were cancelled while claimed or streaming
    tokens_after_cancel: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def tokens_after_each(self) -> float:
        """The figure for each choice that was cancelled while it ran."""
        return self.tokens_after_cancel / max(1, self.num_choices_running)

    def count(self, one: Cancelled) -> None:
        self.met[one.met] += 1
        if one.met in ("claimed", "streaming"):
            self.num_choices_running += one.view.job.params.n

    def violate(self, one: Cancelled, what: str) -> None:
        self.violations.append(f"{one.view.job.id} ({one.met}): {what}")

    def figures(self) -> dict[str, Any]:
        return {
            "cancels": self.ways.total(),
            "seed": self.seed,
            "by way": dict(sorted(self.ways.items())),
            "by the state that was met": dict(sorted(self.met.items())),
            "choices cancelled while running": self.num_choices_running,
            "tokens computed after a cancel": self.tokens_after_cancel,
            "of them for each choice": round(self.tokens_after_each, 2),
        }


async def run_cancels(count: int, seed: int, say: Callable[[str], None] = silent) -> CancelReport:
    """Raises TimeoutError if a job does not stop."""
    report = CancelReport(seed)
    settings: dict[str, Any] = {"engine": ENGINE, "drain_s": 1.0}
    async with pool(HASH_MODEL, num_workers=NUM_WORKERS, **settings) as found:
        cancelled = await _cancel_all(found, count, report, say)
        infos = await found.until_at_rest()
        report.tokens_after_cancel = sum(info["tokens_after_cancel"] for info in infos)
        known_ids = {one.view.job.id for one in cancelled}
        for one in [*cancelled, *await _closed_calls(found, known_ids)]:
            await _check(found, one, report)
        report.violations += found.audit()
    return report


async def _cancel_all(
    found: Pool, count: int, report: CancelReport, say: Callable[[str], None]
) -> list[Cancelled]:
    numbers = iter(range(count))
    cancelled: list[Cancelled] = []

    async def cancel_on(callers: Callers, http: httpx.AsyncClient) -> None:
        for number in numbers:
            plan = Plan.draw(report.seed, number)
            report.ways[plan.way] += 1
            job_id = await _let_go(callers, http, plan)
            if job_id is not None:
                cancelled.append(Cancelled(await _acknowledged(found, job_id)))
            say(f"{report.ways.total()} of {count} cancels")

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=found.url, timeout=60, limits=limits) as http:
        callers = Callers(found.urls, MODEL, seed=report.seed)
        await side_by_side(*(cancel_on(callers, http) for _ in range(NUM_CALLERS)))
    return cancelled


# --- what callers do --------------------------------------------------------------------------


async def _let_go(callers: Callers, http: httpx.AsyncClient, plan: Plan) -> str | None:
    """Asks, and cancels or leaves. Returns the job's id if the caller receives it."""
    if plan.way is Way.STREAM_CLOSED:
        attempt = await callers.call(plan.ask, hang_up_after=plan.num_events)
        assert attempt.status == 200, attempt.reason
        return attempt.job_id
    if plan.way is Way.CALL_CLOSED:  # mostly before its response
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(plan.wait_s):
                attempt = await callers.call(plan.ask, is_stream=False)
                assert attempt.status == 200, attempt.reason
        return None
    attempt = await callers.call(plan.ask, is_job=True)
    assert attempt.status == 202, attempt.reason
    match plan.way:
        case Way.AFTER_A_WHILE | Way.TWICE:
            await asyncio.sleep(plan.wait_s)
        case Way.AT_A_TOKEN:
            await _follow(http, attempt.job_id, plan.num_events)
        case Way.AT_THE_END:
            await _follow(http, attempt.job_id, plan.ask.num_output - 1)
    times = 2 if plan.way is Way.TWICE else 1
    await asyncio.gather(*(_cancel(http, attempt.job_id) for _ in range(times)))
    return attempt.job_id


async def _cancel(http: httpx.AsyncClient, job_id: str) -> None:
    answer = await http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code in (200, 409), answer.text
    assert answer.status_code == 409 or answer.json()["status"] == "cancelled"


async def _follow(http: httpx.AsyncClient, job_id: str, num_events: int) -> None:
    """Reads this many events of a job's output, or all."""
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
        num_seen = 0
        async for event in events_of(events):
            num_seen += event.id is not None
            if num_seen >= num_events:
                return


# --- what must hold ---------------------------------------------------------------------------


async def _acknowledged(found: Pool, job_id: str) -> JobView:
    """The job once its cancel is known, which takes a while after a disconnect."""
    views: list[JobView] = []

    async def has_ended() -> bool:
        views.append((await _read(found, job_id))[0])
        return views[-1].is_terminal

    await until(has_ended)
    return views[-1]


async def _closed_calls(found: Pool, known_ids: set[str]) -> list[Cancelled]:
    """The jobs of closed calls, whose callers never received an id. Their seed is their number."""
    keys = found.caller.keys
    prefix = keys.of("job", "")
    records: Any = await found.caller.client.keys(f"{prefix}*")
    ids = {key.decode()[len(prefix) :] for key in records} - known_ids
    return [Cancelled(await _acknowledged(found, job_id)) for job_id in ids]


async def _check(found: Pool, one: Cancelled, report: CancelReport) -> None:
    job = one.view.job
    view, log = await _read(found, job.id, max_events=100_000)
    report.count(one)
    if view.next_number != one.view.next_number:
        report.violate(one, "its log grew after it had ended")
    if view.claimed_ms != one.view.claimed_ms:
        report.violate(one, "it was started after it had ended")
    answer = Answer()
    for entry in log:
        answer.add(entry)
    if [end.status for end in answer.ends] != [one.view.status]:
        report.violate(one, "its log does not end once, as its record says")
    for choice, token_ids in answer.token_ids.items():
        expected, _ = expected_output(job.prompt_ids, job.params, choice=choice, eos_rate=0.0)
        is_whole = one.view.status is JobStatus.SUCCEEDED
        if token_ids != (expected if is_whole else expected[: len(token_ids)]):
            report.violate(one, f"choice {choice} says something else")


async def _read(found: Pool, job_id: str, max_events: int = 0) -> tuple[JobView, list[LogEntry]]:
    answer = await found.caller.functions.read(job_id, DEFAULT_TENANT, max_events=max_events)
    assert answer is not None, "an accepted job is not lost"
    return answer


def main() -> int:
    parser = parser_of("cancels", __doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many (default: 1000)")
    options = parser.parse_args()
    return run(lambda: run_cancels(options.count, options.seed, Progress().say), options.json)


if __name__ == "__main__":
    sys.exit(main())
