"""A short campaign of cancels; `scripts/cancels --count 5000` is the long one."""

import pytest

from tests.endurance.cancels import run_cancels

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]


async def test_cancelled_jobs_stop() -> None:
    """In every state and by every way: no violation, no slot taken, few tokens computed."""
    met: set[str] = set()
    for seed in range(1, 6):  # a job is claimed and without a token for milliseconds
        report = await run_cancels(count=150, seed=seed)
        assert report.violations == []
        assert report.tokens_after_each < 10
        met |= set(report.met)
        if met == {"queued", "claimed", "streaming", "ended"}:
            return
    raise AssertionError(f"jobs were met only {sorted(met)}")
