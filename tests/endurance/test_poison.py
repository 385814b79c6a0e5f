"""One poison job among a few hundred; `scripts/poison` takes 10,000."""

import pytest

from tests.endurance.poison import run_poison

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]


async def test_a_poison_job_fails_no_other_job() -> None:
    """Three engines die on it, with other jobs in the same step; only the poison job fails."""
    report = await run_poison(num_jobs=300, seed=1)

    assert report.violations == []
    assert report.num_crashes == 3
    assert report.num_suspected > 0, "it must have had company"
