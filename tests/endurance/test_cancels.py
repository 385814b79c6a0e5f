"""A short campaign of cancels; `scripts/cancels --count 5000` is the long one."""

import pytest

from tests.endurance.cancels import run_cancels

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]


async def test_cancelled_jobs_never_run_on() -> None:
    """In every state and every way: nothing violated, no slot taken, hardly a token computed."""
    report = await run_cancels(count=150, seed=1)

    assert report.violations == []
    assert set(report.met) == {"queued", "claimed", "streaming", "ended"}
    assert report.tokens_after_each < 10
