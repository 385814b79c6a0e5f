"""A gateway that serves flows, and fake workers of their members."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio
import yaml  # type: ignore[import-untyped]

from contract.connection import end_tasks
from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import until
from tests.gateway.conftest import make_settings, running_gateway
from tests.gateway.fake_worker import FakeWorker, Script, publish_model, says
from tests.gateway.vector_worker import publish_vector_model, vector_worker

FLOWS = {
    "models": [
        {
            "name": "router",
            "route": {
                "rules": [
                    {"when": {"pattern": "hard"}, "to": [{"model": "large"}]},
                    {"when": {"min_prompt_tokens": 100}, "to": [{"model": "large"}]},
                ],
                "otherwise": [{"model": "small"}],
            },
        },
        {
            "name": "cascade",
            "cascade": {"members": [{"model": "small", "threshold": 0.8}, {"model": "large"}]},
        },
        {"name": "vote", "ensemble": {"members": ["small", "large", "third"], "combine": "vote"}},
        {
            "name": "pipe",
            "pipeline": {
                "steps": [
                    {
                        "name": "draft",
                        "model": "small",
                        "endpoint": "/v1/completions",
                        "body": {"prompt": "{{ input.messages[-1].content }}"},
                    },
                    {
                        "name": "final",
                        "model": "large",
                        "endpoint": "/v1/chat/completions",
                        "body": {
                            "messages": [
                                {"role": "user", "content": "edit: {{ draft.choices[0].text }}"}
                            ]
                        },
                    },
                ]
            },
        },
        {
            "name": "by-tier",
            "route": {
                "rules": [{"when": {"metadata": {"tier": "gold"}}, "to": [{"model": "large"}]}],
                "otherwise": [{"model": "small"}],
            },
        },
        {"name": "checked", "ensemble": {"members": ["by-tier", "by-tier"], "combine": "vote"}},
        {"name": "nested", "ensemble": {"members": ["cascade", "third"], "combine": "vote"}},
    ]
}
MEMBERS = ("small", "large", "third")


class Fleet:
    """The members' workers, each with a script that a test may replace."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self.workers: dict[str, FakeWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *models: str) -> None:
        for model in models:
            await publish_model(self.client, self.keys, model)
            worker = FakeWorker(Functions(self.client, self.keys), model, f"w-{model}")
            worker.script = says(f"I am {model}")
            await self.add(worker)

    async def start_vectors(self, *models: str) -> None:
        for model in models:
            await publish_vector_model(self.client, self.keys, model)
            await self.add(vector_worker(Functions(self.client, self.keys), model))

    async def add(self, worker: FakeWorker) -> None:
        await worker.beat()
        self.workers[worker.model] = worker
        self._tasks[worker.model] = asyncio.create_task(worker.serve())

    async def beat(self) -> None:
        """Workers count as live for 15 s; starting a process may take longer on a busy machine."""
        for worker in self.workers.values():
            await worker.beat()

    def say(self, model: str, script: Script) -> None:
        self.workers[model].script = script

    async def stop_serving(self, *models: str) -> None:
        """From now on the test drives these models' workers; without a name: all."""
        await end_tasks(*(self._tasks[model] for model in models or self._tasks))


@pytest.fixture
async def fleet(redis_client: redis.asyncio.Redis, keys: Keys) -> AsyncIterator[Fleet]:
    found = Fleet(redis_client, keys)
    await found.start(*MEMBERS)
    yield found
    await found.stop_serving()


@pytest.fixture
def models_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(json.dumps(FLOWS))
    return path


@pytest.fixture
def flow_url(redis_server: EmbeddedRedis, fleet: Fleet, models_yaml: Path) -> Iterator[str]:
    """A gateway that serves the flows."""
    with running_gateway(make_settings(redis_server.url, models=str(models_yaml))) as url:
        yield url


@pytest.fixture
def names(models_yaml: Path) -> set[str]:
    """Of the flows."""
    return {model["name"] for model in yaml.safe_load(models_yaml.read_text())["models"]}


@pytest.fixture
async def flows(flow_url: str, names: set[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it, once all flows are served."""
    async with httpx.AsyncClient(base_url=flow_url, timeout=20) as client:

        async def is_served() -> bool:
            listed = (await client.get("/v1/models")).json()["data"]
            return names <= {model["id"] for model in listed}

        await until(is_served, 20)
        yield client


@pytest.fixture
def runner(
    redis_server: EmbeddedRedis, fleet: Fleet, models_yaml: Path
) -> Iterator[subprocess.Popen[str]]:
    """A gateway that runs flows, as a process that can be killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infra", "gateway", "--port=0", "--namespace=test"],
        env=os.environ | {"REDIS_URL": redis_server.url, "BATCHWAY_MODELS": str(models_yaml)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process, process.stderr:
        assert any("flow served model=nested" in line for line in process.stderr)
        yield process
        process.kill()


async def is_live(client: redis.asyncio.Redis, keys: Keys, flow: str) -> bool:
    return bool(await client.zcard(keys.of("workers", flow)))


def chat(model: str, text: str = "hello", **more: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}
