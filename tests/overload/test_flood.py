"""A short flood without settings; `python -m tests.overload.flood` is the long run.

It checks what holds on any machine, however slow.
"""

import dataclasses

import pytest

from tests.overload.arrivals import Ask
from tests.overload.callers import Call
from tests.overload.flood import FloodOptions, FloodReport, run_flood

pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.campaign]

ASK = Ask("default", "interactive", (), 4)
GOOD = Call(ASK, 1.0, 0.0, status=200, ttft_s=1.0, is_whole=True)
REFUSED = Call(ASK, 1.0, 0.0, status=429, reason="lane_full", retry_after_s=1.0)


@pytest.mark.timeout(400)
async def test_guarantees_hold_in_a_flood_without_settings() -> None:
    """Some jobs are accepted; the others and calls get a reason and Retry-After. Calls in the
    interactive lane are answered, and Redis stays within its memory."""
    report = await run_flood(FloodOptions(num_jobs=800, num_calls=40, job_tokens=100))

    assert report.faults() == []
    answers = {(call.status, "" if call.is_admitted else call.reason) for call in report.jobs}
    assert {(202, ""), (429, "lane_full")} <= answers
    assert any(call.status == 200 for call in report.interactive)


def report_of(interactive: Call, **fields: int) -> FloodReport:
    memory = {"memory_bytes": 1, "max_memory_bytes": 2} | fields
    return FloodReport(FloodOptions(), 1.0, [], [REFUSED], [interactive], **memory)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (dataclasses.replace(GOOD, status=500), "answered 500"),
        (dataclasses.replace(GOOD, status=0, reason="TimeoutError"), "answered 0"),
        (dataclasses.replace(REFUSED, status=503), "answered 503 lane_full"),
        (dataclasses.replace(REFUSED, retry_after_s=None), "without Retry-After"),
        (dataclasses.replace(GOOD, is_whole=False), "broke off"),
        (dataclasses.replace(GOOD, ttft_s=12.0), "waited up to 12.0 s"),
    ],
)
def test_undocumented_answers_and_long_waits_are_violations(call: Call, word: str) -> None:
    assert report_of(GOOD).violations == []
    assert any(word in sentence for sentence in report_of(call).violations)


def test_a_redis_over_or_without_maxmemory_is_a_violation() -> None:
    for max_memory_bytes in (0, 1):
        report = report_of(GOOD, max_memory_bytes=max_memory_bytes)
        assert "Redis used" in report.violations[0]
