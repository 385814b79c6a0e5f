"""A worker in a container: its weights, its scale-in protection, its health."""

import os
import socket
from pathlib import Path

import boto3
import pytest
import redis.asyncio

from contract.functions import Functions
from contract.keys import Keys
from infra.aws import container_entry, worker_health
from infra.aws.container_entry import WeightsMissing, fetch_weights
from infra.embedded_redis import EmbeddedRedis
from tests.aws.template import container
from tests.gateway.fake_worker import FakeWorker, publish_model
from tests.loopback import Handler, running_server
from workers.settings import new_incarnation
from workers.supervisor.load_progress import LoadProgress

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

    num_bytes: list[int] = []
    fetch_weights(client, "s3://weights-1/m/", tmp_path, num_bytes.append)
    assert sum(num_bytes) == 5  # for its health check
    (tmp_path / "config.json").write_bytes(b"[]")
    fetch_weights(client, "s3://weights-1/m", tmp_path)

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
        fetch_weights(boto3.client("s3"), "s3://weights-2/none", tmp_path / "a")
    with pytest.raises(WeightsMissing, match="outside the folder"):
        fetch_weights(boto3.client("s3"), "s3://weights-2/m", tmp_path / "a")
    assert not list(tmp_path.rglob("evil"))


def test_the_model_becomes_options(aws_environ: dict[str, str], tmp_path: Path) -> None:
    """The demo model needs none; a folder becomes its path, an S3 URL its download's folder."""
    upload("weights-3", {"m/config.json": b"{}"})
    named = {"BATCHWAY_MODEL": "s3://weights-3/m", "BATCHWAY_SERVED_MODEL_NAME": "n"}
    progress = tmp_path / "progress"
    options = container_entry.model_arguments(named, tmp_path, progress)
    assert options == [f"--model={tmp_path}", "--served-model-name=n"]
    asked = container_entry.model_arguments({"BATCHWAY_MODEL": "/m"}, tmp_path, progress)
    assert asked == ["--model=/m"]
    assert container_entry.model_arguments({}, tmp_path, progress) == []


class Metadata(Handler):
    """ECS's task metadata endpoint, version 4."""

    def do_GET(self) -> None:
        task = b'{"TaskARN": "arn:aws:ecs:eu-central-1:123456789012:task/c/0123abcd"}'
        self.answer(200 if self.path == "/v4/x/task" else 404, task)


def test_a_worker_is_named_after_its_ecs_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(Metadata) as url:
        host = worker_health.host_name({"ECS_CONTAINER_METADATA_URI_V4": f"{url}/v4/x"})
    assert host == "0123abcd"
    monkeypatch.setenv("BATCHWAY_HOST", host)
    assert new_incarnation().startswith("0123abcd-")
    assert worker_health.host_name({}) == socket.gethostname().split(".")[0]


async def test_health_follows_heartbeats(
    redis_client: redis.asyncio.Redis,
    redis_server: EmbeddedRedis,
    keys: Keys,
    functions: Functions,
    tmp_path: Path,
) -> None:
    """A worker of this host must have sent one recently. Without Redis the check passes, so that no
    worker is ended."""
    await publish_model(redis_client, keys)
    none = tmp_path / "none"
    assert not await worker_health.check(redis_server.url, "test", "here", none)
    await FakeWorker(functions, incarnation="elsewhere-1-ab").beat()
    assert not await worker_health.check(redis_server.url, "test", "here", none)
    await FakeWorker(functions, incarnation="here-1-ab").beat()
    assert await worker_health.check(redis_server.url, "test", "here", none)
    assert await worker_health.check("redis://127.0.0.1:1", "test", "here", none)


async def test_health_passes_while_a_worker_loads_and_gets_on(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """For an hour at most, and half an hour without a step. Not in the check's start period, so
    that a deployment does not take a worker for good that fails within it."""
    path = tmp_path / "loading"

    def healthy_minutes(step_s: float) -> list[int]:
        """Whole minutes of the first 90 in which the check passes; a step each `step_s`."""
        path.write_text("1000 ")
        passed = []
        for minute in range(90):
            noted_s = 1000 + minute * 60 // step_s * step_s
            os.utime(path, (noted_s, noted_s))
            passed += [minute] * worker_health.is_loading(path, 1000 + minute * 60)
        return passed

    assert healthy_minutes(60) == list(range(5, 60))
    assert healthy_minutes(10_000) == list(range(5, 30))
    path.unlink()
    assert not await worker_health.check(redis_server.url, "test", "loading", path)
    progress = LoadProgress(str(path))
    progress.note()  # an engine that was ready is loaded again
    assert await worker_health.check(redis_server.url, "test", "loading", path)
    progress.begin()
    assert not await worker_health.check(redis_server.url, "test", "loading", path)
    progress.end()
    assert not path.exists()


def test_the_check_outlasts_the_start_period_of_the_images() -> None:
    """A worker that loads must be healthy before failures count."""
    [check] = [container("WorkerTask")["HealthCheck"]]
    assert "--start-period=300s" in Path("Dockerfile.worker").read_text()
    assert check["StartPeriod"] == 300 > worker_health._START_PERIOD_S + check["Interval"] - 1
    assert check["Interval"] * check["Retries"] >= 60
