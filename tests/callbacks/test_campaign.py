"""A short run of the campaign: a tenth of the jobs and of the kills."""

import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.campaign import Plan, run_campaign

PLAN = Plan(num_jobs=100, num_kills=5, down_s=2.0, slow_s=0.2, num_workers=1)

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]


async def test_every_callback_is_delivered_despite_failures_and_kills() -> None:
    """At least once, under one id, signed. No callback is given up."""
    with EmbeddedRedis() as server:
        report = await run_campaign(server.url, PLAN)
    assert report.violations == []
    assert report.num_attempts > report.num_jobs
