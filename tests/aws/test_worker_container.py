"""A worker in a container: its weights, its scale-in protection, its health."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import boto3
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.aws import worker_entry, worker_health
from infra.aws.task_protection import TaskProtection
from infra.aws.worker_entry import WeightsMissing, fetch
from infra.embedded_redis import EmbeddedRedis
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio


def upload(bucket: str, files: dict[str, bytes]) -> None:
    client = boto3.client("s3")
    client.create_bucket(
        Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
    )
    for name, content in files.items():
        client.put_object(Bucket=bucket, Key=name, Body=content)


def test_weights_are_downloaded_from_s3_once(aws_environ: dict[str, str], tmp_path: Path) -> None:
    """The whole folder. A local file of the same size is not downloaded again."""
    upload("weights-1", {"m/config.json": b"{}", "m/a/model.safetensors": b"abc", "other/x": b"x"})
    client = boto3.client("s3")

    fetch(client, "s3://weights-1/m/", tmp_path)
    (tmp_path / "config.json").write_bytes(b"[]")
    fetch(client, "s3://weights-1/m", tmp_path)

    kept = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert kept == {"config.json": b"[]", "a/model.safetensors": b"abc"}


def test_missing_weights_and_unsafe_keys_are_errors(
    aws_environ: dict[str, str], tmp_path: Path
) -> None:
    """A worker without weights must not start, and a key must not write outside the folder."""
    upload("weights-2", {"m/../../evil": b"x"})
    with pytest.raises(WeightsMissing, match="no files at s3://weights-2/none"):
        fetch(boto3.client("s3"), "s3://weights-2/none", tmp_path / "a")
    with pytest.raises(WeightsMissing, match="outside the folder"):
        fetch(boto3.client("s3"), "s3://weights-2/m", tmp_path / "a")
    assert not list(tmp_path.rglob("evil"))


def test_the_model_becomes_options(aws_environ: dict[str, str], tmp_path: Path) -> None:
    """The demo model needs none; a folder becomes its path, an S3 URL its download's folder."""
    upload("weights-3", {"m/config.json": b"{}"})
    named = {"BATCHWAY_MODEL": "s3://weights-3/m", "BATCHWAY_SERVED_MODEL_NAME": "n"}
    options = worker_entry.model_arguments(named, tmp_path)
    assert options == [f"--model={tmp_path}", "--served-model-name=n"]
    assert worker_entry.model_arguments({"BATCHWAY_MODEL": "/m"}) == ["--model=/m"]
    assert worker_entry.model_arguments({}) == []


class Agent(HTTPServer):
    """The ECS agent's task protection API. `status` is what it answers."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _AgentHandler)
        self.requests: list[tuple[str, object]] = []


class _AgentHandler(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        assert isinstance(self.server, Agent)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, json.loads(body)))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Agent() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


ON = {"ProtectionEnabled": True, "ExpiresInMinutes": 15}
OFF = {"ProtectionEnabled": False}


def test_a_task_is_protected_while_it_has_jobs(agent: Agent) -> None:
    """And for 10 s longer. The agent gets changes, and a renewal before the protection expires."""
    protection = TaskProtection(f"http://127.0.0.1:{agent.server_port}/api/x")
    for now_s, num_jobs in [
        (0, 0),
        (1, 1),
        (2, 3),
        (302, 1),
        (303, 0),
        (311, 0),
        (312, 0),
        (400, 0),
    ]:
        protection.note(num_jobs, now_s)
    assert [body for _, body in agent.requests] == [ON, ON, OFF]
    assert agent.requests[0][0] == "/api/x/task-protection/v1/state"


def test_a_failed_protection_request_is_repeated(agent: Agent) -> None:
    """Until it succeeds. An agent that cannot be reached raises no error."""
    protection = TaskProtection(f"http://127.0.0.1:{agent.server_port}")
    agent.status = 500
    protection.note(1, 1)
    agent.status = 200
    protection.note(1, 2)
    protection.note(1, 3)
    TaskProtection("http://127.0.0.1:1").note(1, 1)
    assert len(agent.requests) == 2


async def test_health_follows_heartbeats(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, keys: Keys, functions: Functions
) -> None:
    """A worker of this host must have sent one recently. Without Redis the check passes, so that no
    worker is ended."""
    await publish_model(redis_client, keys)
    assert not await worker_health.check(redis_server.url, "test")
    await FakeWorker(functions, incarnation="elsewhere-1-ab").beat()
    assert not await worker_health.check(redis_server.url, "test")
    host = socket.gethostname().split(".")[0]
    await FakeWorker(functions, incarnation=f"{host}-1-ab").beat()
    assert await worker_health.check(redis_server.url, "test")
    assert await worker_health.check("redis://127.0.0.1:1", "test")
    assert MODEL


async def test_a_signal_reaches_the_worker(
    redis_client: redis.asyncio.Redis, redis_server: EmbeddedRedis, agent: Agent,
    keys: Keys, functions: Functions, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The container's first process passes it on and exits as its child does. A worker with a job
    is protected."""
    await publish_model(redis_client, keys)
    monkeypatch.setenv("BATCHWAY_NAMESPACE", "test")
    host = socket.gethostname().split(".")[0]
    incarnation = f"{host}-1-ab"
    await FakeWorker(functions, incarnation=incarnation).beat()
    await redis_client.sadd(keys.of("own", incarnation), "job")
    program = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); signal.pause()"
    url = f"http://127.0.0.1:{agent.server_port}"
    running = asyncio.create_task(
        worker_entry.run([sys.executable, "-c", program], redis_server.url, url)
    )
    async with asyncio.timeout(30):
        while not agent.requests:  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0.01)
    # The child may not have its handler yet, so the signal is repeated until it ends.
    while not running.done():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)

    assert await running in (7, -signal.SIGTERM)
    assert agent.requests[0][1] == ON
