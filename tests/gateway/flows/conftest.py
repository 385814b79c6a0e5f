"""A gateway that serves flows, and fake workers of their members."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio

from contract.connection import end_tasks
from contract.functions import Functions
from contract.keys import Keys
from infra.embedded_redis import EmbeddedRedis
from tests.fleet import until
from tests.gateway.conftest import (
    Gateways,
    gateway_client,
    make_settings,
    running_gateway,
    until_listed,
)
from tests.gateway.fake_worker import FakeWorker, Script, publish_model, says
from tests.gateway.flows.model_files import (
    CHAT,
    COMPLETIONS,
    cascade,
    ensemble,
    pipeline,
    route,
    rule,
    step,
    user,
    write,
)
from tests.gateway.vector_worker import publish_vector_model, vector_worker

FLOWS = {
    "router": route(
        "small", rules=[rule("large", pattern="hard"), rule("large", min_prompt_tokens=100)]
    ),
    "cascade": cascade("small", "large", threshold=0.8),
    "vote": ensemble("vote", "small", "large", "third"),
    "pipe": pipeline(
        step("draft", "small", COMPLETIONS, prompt="{{ input.messages[-1].content }}"),
        step("final", "large", CHAT, messages=user("edit: {{ draft.choices[0].text }}")),
    ),
    "by-tier": route("small", rules=[rule("large", metadata={"tier": "gold"})]),
    "checked": ensemble("vote", "by-tier", "by-tier"),
    "nested": ensemble("vote", "cascade", "third"),
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
def models_yaml(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The FLOWS of the test's module, or those above."""
    return write(tmp_path, **getattr(request.module, "FLOWS", FLOWS))


@pytest.fixture
def flow_url(redis_server: EmbeddedRedis, fleet: Fleet, models_yaml: Path) -> Iterator[str]:
    """A gateway that serves the flows."""
    with running_gateway(make_settings(redis_server.url, models=str(models_yaml))) as url:
        yield url


@pytest.fixture
def names(models_yaml: Path) -> set[str]:
    """Of the flows."""
    return {model["name"] for model in json.loads(models_yaml.read_text())["models"]}


@pytest.fixture
async def flows(flow_url: str, names: set[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it, once all flows are served."""
    async with httpx.AsyncClient(base_url=flow_url, timeout=20) as client:
        await until_listed(client, names)
        yield client


@pytest.fixture
async def client(flows: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of the same gateway."""
    base_url = f"{flows.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def runners(redis_server: EmbeddedRedis, models_yaml: Path) -> Gateways:
    """Gateways that run the flows, each with a client."""
    return partial(gateway_client, redis_server.url, models=str(models_yaml))


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


async def until_live(fleet: Fleet, flow: str) -> None:
    """Returns once a process runs the flow; the members' workers are live, too."""

    async def is_so() -> bool:
        return bool(await fleet.client.zcard(fleet.keys.of("workers", flow)))

    await until(is_so)
    await fleet.beat()


def chat(model: str, text: str = "hello", **more: object) -> dict[str, object]:
    return {"model": model, "messages": user(text), **more}


def answer_of(answer: httpx.Response) -> str:
    """The text of a whole chat."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def job(model: str, **more: object) -> dict[str, object]:
    return {"endpoint": CHAT, "body": chat(model, max_tokens=50), **more}


async def submitted(flows: httpx.AsyncClient, body: dict[str, object]) -> str:
    answer = await flows.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def ended(flows: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """A job's object once it has ended."""
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        found.update((await flows.get(f"/v1/jobs/{job_id}")).json())
        return found["status"] not in ("queued", "running")

    await until(has_ended, 20)
    return found
