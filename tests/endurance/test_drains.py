"""A few workers drained under load; `scripts/drains --count 200` is the long run."""

import pytest

from tests.endurance.drains import run_drains

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]


async def test_jobs_outlive_drained_workers() -> None:
    """No job is lost, repeated or charged an attempt, and every worker exits."""
    report = await run_drains(count=4, seed=1, budget_s=1.5)

    assert report.violations == []
    assert report.num_moved > 0, "some jobs must be longer than a budget"
