"""The gateway on Fargate, as the container starts it, beside a function: it runs flows and
batches."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from botocore.exceptions import ClientError

from contract.connection import end_tasks
from contract.functions import Functions
from contract.keys import Keys
from infra.aws.container_entry import fetch_flows, main
from infra.embedded_redis import EmbeddedRedis
from tests.aws.conftest import Invoke
from tests.aws.lambda_events import rest_event
from tests.aws.test_worker_container import upload
from tests.fleet import until
from tests.gateway.fake_worker import FakeWorker, publish_model, says

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parent.parent.parent
FLOW = {"models": [{"name": "vote", "ensemble": {"members": ["a", "b"], "combine": "vote"}}]}
BODY = {"model": "vote", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def members(redis_client: redis.asyncio.Redis, keys: Keys) -> AsyncIterator[list[FakeWorker]]:
    workers, serving = [], []
    for model in ("a", "b"):
        await publish_model(redis_client, keys, model)
        worker = FakeWorker(Functions(redis_client, keys), model, f"w-{model}")
        worker.script = says("yes")
        await worker.beat()
        workers.append(worker)
        serving.append(asyncio.create_task(worker.serve()))
    yield workers
    await end_tasks(*serving)


@pytest.fixture
async def container(
    aws_environ: dict[str, str], redis_server: EmbeddedRedis, members: list[FakeWorker]
) -> AsyncIterator[None]:
    """With its flows and its store in S3."""
    upload("flows-1", {"f/models.yaml": json.dumps(FLOW).encode()})
    environ = {
        "PATH": os.environ["PATH"],
        **aws_environ,
        "REDIS_URL": redis_server.url,
        "BATCHWAY_NAMESPACE": "test",
        "BATCHWAY_OBJECT_STORE": "s3://flows-1/jobs",
        "BATCHWAY_MODELS": "s3://flows-1/f/models.yaml",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "infra.aws.container_entry", "gateway", "--port", "0"),
        cwd=ROOT,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
    )
    yield
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


@pytest.mark.campaign
async def test_what_a_function_accepts_is_run(
    container: None,
    members: list[FakeWorker],
    invoke: Invoke,
    redis_client: redis.asyncio.Redis,
    keys: Keys,
) -> None:
    """The call of a flow; and batches have a feeder."""

    async def is_served() -> bool:
        return await redis_client.zcard(keys.of("workers", "vote")) > 0

    await until(is_served)
    for worker in members:
        await worker.beat()  # the container may take longer to start than a heartbeat lasts
    answer = await invoke(rest_event("POST", "/v1/chat/completions", BODY))
    assert answer["statusCode"] == 200, answer["body"]
    assert json.loads(answer["body"])["choices"][0]["message"]["content"] == "yes"
    assert answer["headers"]["x-batchway-models"] == "a, b"
    assert await redis_client.exists(keys.of("batches_fed"))


def test_flows_are_fetched_or_have_a_path(aws_environ: dict[str, str]) -> None:
    """Or there are none. A missing file is an error, with which the container ends."""
    upload("flows-2", {"f.yaml": b"models: []"})
    fetched = {"BATCHWAY_MODELS": "s3://flows-2/f.yaml"}
    fetch_flows(fetched)
    assert Path(fetched["BATCHWAY_MODELS"]).read_text() == "models: []"
    for environ in ({"BATCHWAY_MODELS": "/models.yaml"}, {"BATCHWAY_MODELS": ""}, {}):
        before = dict(environ)
        fetch_flows(environ)
        assert environ == before
    with pytest.raises(ClientError):
        fetch_flows({"BATCHWAY_MODELS": "s3://flows-2/none.yaml"})


def test_the_container_takes_the_operators_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As functions do, before the gateway reads its environment."""
    monkeypatch.setenv("BATCHWAY_POLL_S", "1")
    monkeypatch.setenv("BATCHWAY_MODELS", "")
    monkeypatch.setenv("BATCHWAY_SETTINGS", "BATCHWAY_POLL_S=7")
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: became.append(command))
    main(["gateway", "--host", "127.0.0.1"])
    assert became[0][1:] == ["-m", "infra", "gateway", "--host", "127.0.0.1"]
    assert os.environ["BATCHWAY_POLL_S"] == "7"
