"""A short campaign of cancels; `scripts/cancels --count 5000` is the long one."""

import pytest

from tests.endurance.cancels import run_cancels

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]


async def test_cancelled_jobs_stop() -> None:
    """In every state and by every way: no violation, no slot taken, few tokens computed."""
    report = await run_cancels(count=150, seed=1)

    assert report.violations == []
    assert set(report.met) == {"queued", "claimed", "streaming", "ended"}
    assert report.tokens_after_each < 10
