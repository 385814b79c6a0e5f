"""A Redis that does not reply: the engine continues, and its output accumulates."""

import httpx
import pytest

from contract.events import Tokens
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, expected_output
from tests.fleet import Caller, fleet, until
from tests.ports import free_port
from tests.telemetry.test_exactness import page_of, summed

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

MODEL = HashModelOptions(step_s=0.005, eos_rate=0.0)
NUM_WAITED = 40  # tokens


async def test_redis_does_not_hold_up_the_step(caller: Caller, redis_server: EmbeddedRedis) -> None:
    """While no write is acknowledged, the engine computes everything left; then one event contains
    it."""
    port = free_port()
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
        fleet(redis_server.url, 1, MODEL, metrics_port=port, lease_s=60.0),
    ):

        async def num_computed() -> float:
            return summed(await page_of(http), "step_tokens_total", kind="decode")

        job = await caller.submit("a long answer", max_tokens=200)
        await caller.has_output(job)
        await caller.client.client_pause(60_000, all=False)
        num_before = await num_computed()

        async def is_far() -> bool:
            return await num_computed() >= num_before + NUM_WAITED

        await until(is_far)
        await caller.client.client_unpause()
        answer = await caller.answer(job)

        expected, _ = expected_output(job.prompt_ids, job.params, eos_rate=0.0)
        assert answer.token_ids[0] == expected
        entries = await caller.entries(job)
        sizes = [len(e.event.deltas[0].token_ids) for e in entries if isinstance(e.event, Tokens)]
        assert max(sizes) >= NUM_WAITED - 2  # two events were under way when it fell silent
