"""A short flood without settings; `python -m tests.overload.flood` is the long run.

It checks what holds on any machine, however slow.
"""

import dataclasses

import pytest

from infra.measure.load import Outcome
from tests.campaigns.load import Ask, Attempt
from tests.overload.flood import FloodOptions, FloodReport, run_flood

pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.campaign]

ASK = Ask("default", "interactive", (), 4)
GOOD = Attempt(
    *(0, 0, 1.0, 1.0), status=200, chunk_times_s=[2.0], outcome=Outcome.SUCCEEDED, is_done=True,
    ask=ASK,
)  # fmt: skip
REFUSED = Attempt(
    *(0, 0, 1.0, 1.0), status=429, reason="lane_full", headers={"retry-after": "1"}, ask=ASK
)


@pytest.mark.timeout(400)
async def test_guarantees_hold_in_a_flood_without_settings() -> None:
    """Some jobs are accepted; the others and calls get a reason and Retry-After. Calls in the
    interactive lane are answered, and Redis stays within its memory."""
    report = await run_flood(FloodOptions(num_jobs=800, num_calls=40, job_tokens=100))

    assert report.faults() == []
    answers = {(call.status, "" if call.is_admitted else call.reason) for call in report.jobs}
    assert {(202, ""), (429, "lane_full")} <= answers
    assert any(call.status == 200 for call in report.interactive)


def report_of(interactive: Attempt, **fields: int) -> FloodReport:
    memory = {"memory_bytes": 1, "max_memory_bytes": 2} | fields
    return FloodReport(FloodOptions(), 1.0, [], [REFUSED], [interactive], **memory)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (dataclasses.replace(GOOD, status=500), "answered 500"),
        (dataclasses.replace(GOOD, status=0, reason="TimeoutError"), "answered 0"),
        (dataclasses.replace(REFUSED, status=503), "answered 503 lane_full"),
        (dataclasses.replace(REFUSED, headers={}), "without Retry-After"),
        (dataclasses.replace(GOOD, outcome=Outcome.FAILED), "broke off"),
        (dataclasses.replace(GOOD, chunk_times_s=[13.0]), "waited up to 12.0 s"),
    ],
)
def test_undocumented_answers_and_long_waits_are_violations(call: Attempt, word: str) -> None:
    assert report_of(GOOD).violations == []
    assert any(word in sentence for sentence in report_of(call).violations)


def test_a_redis_over_or_without_maxmemory_is_a_violation() -> None:
    for max_memory_bytes in (0, 1):
        report = report_of(GOOD, max_memory_bytes=max_memory_bytes)
        assert "Redis used" in report.violations[0]
