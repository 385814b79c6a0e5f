"""Batches whose model is a flow."""

from pathlib import Path

import pytest
from openai import AsyncOpenAI

from infra.embedded_redis import EmbeddedRedis
from tests.batches.test_batches import CHAT, Url, ended, ids, jsonl, results, start
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.flows.conftest import Fleet, chat

RESPONSES: Url = "/v1/responses"
pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, chat("pipe")), (RESPONSES, {"model": "pipe", "input": "hello", "store": False})],
)
async def test_a_batch_calls_a_flow(
    redis_server: EmbeddedRedis,
    fleet: Fleet,
    models_yaml: Path,
    tmp_path: Path,
    path: Url,
    asked: dict[str, object],
) -> None:
    """Each line is a call of it, answered by its members under its name."""
    settings = make_settings(
        redis_server.url, models=str(models_yaml), object_store=str(tmp_path / "objects")
    )
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": path, "body": asked}
        for number in range(3)
    ]
    with running_gateway(settings) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def is_served() -> bool:
                return "pipe" in [model.id async for model in client.models.list()]

            await until(is_served, 20)
            batch = await ended(client, await start(client, jsonl(lines), path))
            found = await results(client, batch.output_file_id)
    assert (batch.status, ids(found)) == ("completed", ["0", "1", "2"])
    assert {each["response"]["body"]["model"] for each in found} == {"pipe"}
    assert len(fleet.workers["large"].seen) == 3
