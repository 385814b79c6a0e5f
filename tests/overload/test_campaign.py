"""Ten times the capacity for a few seconds; `scripts/overload` is the long run, with the goals.

It checks what holds on any machine, and only loose bounds of ratios.
"""

import dataclasses

import pytest

from infra.measure.load import Outcome
from tests.campaigns.load import Ask, Attempt
from tests.overload.arrivals import FLOOD
from tests.overload.campaign import OverloadOptions, run_overload
from tests.overload.report import Ended, OverloadReport, Phase

pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.campaign]

ASK = Ask(FLOOD, "interactive", (1, 2, 3), 4)
GOOD = Attempt(
    *(0, 3, 1.0, 1.0), status=200, num_output_tokens=4, outcome=Outcome.SUCCEEDED, is_done=True,
    ask=ASK, headers={"x-job-id": "job-0-1"},
)  # fmt: skip
ENDED = Ended(ASK, True, "succeeded", 1.0, 1.5, 2.0, 3, 4)


def report_of(*calls: Attempt, **fields: object) -> OverloadReport:
    """A report with an overload phase only."""
    base = OverloadReport(
        factor=10.0,
        seconds=10.0,
        seed=1,
        peak_tokens_per_s=1.0,
        phases={"overload": Phase("overload", 0.0, 10.0)},
        calls=calls,
        num_told_later=0,
        ended=[ENDED],
        memory_bytes=(2**20, 2**20),
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


@pytest.mark.timeout(300)
async def test_guarantees_hold_at_ten_times_the_capacity() -> None:
    """Accepted jobs end once and completely; the others get a reason and Retry-After. Every lane
    gets its share, light tenants are admitted, memory is limited, and callers that come back
    when told are admitted."""
    report = await run_overload(OverloadOptions(seconds=6.0, after_s=12.0, num_unloaded=10))

    assert report.faults() == []
    answers = {(call.status, call.reason) for call in report.of("overload")}
    assert {(429, "lane_full"), (429, "tenant_quota")} <= answers
    assert all(call.retry_after_s for call in report.calls if call.status == 429)
    assert report.goodput_ratio > 0.5
    assert report.shares["batch"] > 0.02
    assert report.admitted_share_of_lights > 0.5
    assert report.light_ttfts("overload")
    assert len(report.second_tries("afterwards")) >= 5
    assert report.return_share > 0.5


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (dataclasses.replace(GOOD, status=500), "answered 500"),
        (dataclasses.replace(GOOD, status=503, reason="lane_full"), "answered 503 lane_full"),
        (dataclasses.replace(GOOD, status=429, reason=""), "answered 429"),
        (dataclasses.replace(GOOD, status=0, reason="TimeoutError"), "answered 0"),
        (dataclasses.replace(GOOD, outcome=Outcome.FAILED), "broke off"),
        (dataclasses.replace(GOOD, num_output_tokens=3), "3 of 4 tokens"),
    ],
)
def test_undocumented_answers_and_broken_streams_are_faults(call: Attempt, word: str) -> None:
    assert report_of(GOOD).faults() == []
    assert any(word in sentence for sentence in report_of(GOOD, call).faults())


def test_failed_jobs_memory_and_audit_are_faults() -> None:
    """An accepted job that did not succeed, memory above its limit, a broken invariant."""
    expired = dataclasses.replace(ENDED, is_good=False, status="expired")
    assert report_of(GOOD, ended=[ENDED, expired]).faults() == ["1 accepted jobs are expired"]
    assert "Redis used" in report_of(GOOD, memory_bytes=(2**20, 2**25)).faults()[0]
    assert report_of(GOOD, audit=["I5"]).faults() == ["I5"]


def test_tokens_count_in_the_phase_that_computed_them() -> None:
    """For jobs that began before the overload or ended after it."""
    asks = dataclasses.replace(ENDED, first_token_s=-1.0, finished_s=2.0)
    assert report_of(ended=[asks]).tokens["interactive"] == 3
    asks = dataclasses.replace(ENDED, first_token_s=9.0, finished_s=12.0)
    assert report_of(ended=[asks]).tokens["interactive"] == ENDED.num_prompt + 1


def test_a_lane_below_its_minimum_share_is_a_missed_goal() -> None:
    """Except for one job: a tenth of 1,000 tokens is 100."""
    rest = dataclasses.replace(ENDED, num_prompt=900, num_output=0)
    batch = dataclasses.replace(ENDED, ask=dataclasses.replace(ASK, lane="batch"))
    missed = "missed: share of the batch lane"
    behind = dataclasses.replace(batch, num_prompt=57, num_output=5)
    assert missed in report_of(ended=[rest, behind]).misses()
    at_most_one_job = dataclasses.replace(batch, num_prompt=61, num_output=5)
    assert missed not in report_of(ended=[rest, at_most_one_job]).misses()
