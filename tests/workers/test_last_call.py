"""A place that becomes free at a step's end goes to the job that is first in turn at that time."""

from pathlib import Path

import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet
from tests.workers.test_supervisor import assert_exact

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

SLOW = HashModelOptions(num_blocks=64, step_s=1.0, eos_rate=0.0)
BATCHING = """
max_num_seqs: 1
lanes:
  first: {priority: 1}
  second: {priority: 1}
"""


async def test_a_job_claimed_in_the_last_step_joins_the_next(
    functions: Functions,
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
    tmp_path: Path,
) -> None:
    """The one place holds a job in its last step, and another job waits. A job of a lane claimed
    earlier gets the place, although it arrived during that step."""
    caller = Caller(functions, redis_client, keys)
    batching = tmp_path / "batching.yaml"
    batching.write_text(BATCHING)
    async with fleet(redis_server.url, 1, SLOW, batching_path=str(batching)):
        running = await caller.submit("runs", lane="first", max_tokens=2)
        waiting = await caller.submit("waits", lane="second", max_tokens=1)
        await caller.has_output(running)
        late = await caller.submit("comes late", lane="first", max_tokens=1)
        for job in (running, waiting, late):
            assert_exact(job, await caller.answer(job), SLOW)
        [late_ms, waiting_ms] = [(await caller.view(job)).finished_ms for job in (late, waiting)]
        assert late_ms is not None
        assert waiting_ms is not None
        assert late_ms < waiting_ms
