"""A worker's own metrics page, served on its port while it lives, with its own counts."""

import socket
from pathlib import Path

import httpx
import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions
from tests.fleet import Caller, fleet
from tests.hash_worker import hash_worker_settings
from tests.ports import free_port
from tests.telemetry.test_exactness import page_of, summed
from workers.supervisor.metrics import Meter, MetricsUnservable, serve_metrics

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]


async def test_a_worker_shows_its_steps_and_ends_with_its_page(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """The steps show at once, before any heartbeat."""
    port = free_port()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        model = HashModelOptions(eos_rate=0.0)
        async with fleet(redis_server.url, 1, model, metrics_port=port) as [worker]:
            job = await caller.submit("steps", max_tokens=30)
            await caller.answer(job)
            shown = await page_of(http)
            assert summed(shown, "step_tokens_total", kind="decode") == 29
            assert summed(shown, "step_tokens_total", kind="prefill") == len(job.prompt_ids)
            assert summed(shown, "steps_total") == 30 - 16, "those with a prediction"
            assert summed(shown, "step_model_seconds_total") > 0
            assert summed(shown, "step_predicted_seconds_total") > 0
            assert summed(shown, "inter_token_latency_seconds_count", lane="standard") == 29
            assert (await http.post("/metrics")).status_code == 405
            assert await worker.stop() == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/metrics")


async def test_a_worker_does_not_start_if_its_metrics_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = hash_worker_settings("", metrics_port=taken.getsockname()[1])
        with pytest.raises(MetricsUnservable, match="no metrics on"):
            await serve_metrics(settings, Meter())
