"""Workers of a scripted model behind a real gateway, and its callers."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.fakes import HashModelOptions
from tests.fleet import WorkerProcess
from tests.real.families import Family
from tests.real.model_folder import say, write_model_folder

_START_S = 240.0  # on a busy machine


class Server:
    def __init__(self, family: Family, folder: Path, redis_url: str, url: str) -> None:
        self.family = family
        self.folder = folder
        self.url = url
        self._redis_url = redis_url
        self._workers: list[WorkerProcess] = []
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def start(self) -> None:
        write_model_folder(self.family, self.folder)
        self.have(1)

    def have(self, num_workers: int) -> None:
        """Starts workers until so many live, and waits until they are ready."""
        self._workers = [worker for worker in self._workers if worker.is_alive]
        while len(self._workers) < num_workers:
            self._workers.append(self._worker())
        until_true(self._is_ready)

    @property
    def num_alive(self) -> int:
        return sum(worker.is_alive for worker in self._workers)

    def _worker(self) -> WorkerProcess:
        engine = {"model_path": str(self.folder), "max_num_batched_tokens": 4096}
        return WorkerProcess(
            self._redis_url,
            HashModelOptions(),
            served_model_name=self.family.name,
            engine_module="tests.real.scripted_engine",
            lease_s=1.0,
            engine=engine,
        )

    def _is_ready(self) -> bool:
        assert self.num_alive, "no worker could start"
        workers = httpx.get(f"{self.url}/readyz").json().get("workers", {})
        return bool(workers.get(self.family.name, 0) >= len(self._workers))

    def close(self) -> None:
        self.client.close()
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            asyncio.run(worker.close())

    def say(self, text: str) -> str:
        """What a prompt must contain so that the model says a text."""
        return say(self.folder, text)


def until_true(condition: Any, timeout_s: float = _START_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.05)


@contextlib.contextmanager
def running_server(family: Family, folder: Path, redis_url: str, url: str) -> Iterator[Server]:
    server = Server(family, folder, redis_url, url)
    try:
        server.start()
        yield server
    finally:
        server.close()
