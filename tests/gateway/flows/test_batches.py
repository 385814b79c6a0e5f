"""Batches whose model is a flow."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from infra.embedded_redis import EmbeddedRedis
from tests.batches.test_batches import CHAT, Url, ended, ids, jsonl, results, start
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.flows.conftest import Fleet, chat

RESPONSES: Url = "/v1/responses"
pytestmark = pytest.mark.anyio


@pytest.fixture
def flow_url(
    redis_server: EmbeddedRedis, fleet: Fleet, models_yaml: Path, tmp_path: Path
) -> Iterator[str]:
    """A gateway that serves the flows and stores files."""
    store, models = str(tmp_path / "objects"), str(models_yaml)
    with running_gateway(make_settings(redis_server.url, models=models, object_store=store)) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, chat("pipe")), (RESPONSES, {"model": "pipe", "input": "hello", "store": False})],
)
async def test_a_batch_calls_a_flow(
    client: AsyncOpenAI, fleet: Fleet, path: Url, asked: dict[str, object]
) -> None:
    """Each line is a call of it, answered by its members under its name."""
    line = {"method": "POST", "url": path, "body": asked}
    lines = [{"custom_id": f"{number}", **line} for number in range(3)]
    batch = await ended(client, await start(client, jsonl(lines), path))
    found = await results(client, batch.output_file_id)
    assert (batch.status, ids(found)) == ("completed", ["0", "1", "2"])
    assert {each["response"]["body"]["model"] for each in found} == {"pipe"}
    assert len(fleet.workers["large"].seen) == 3
