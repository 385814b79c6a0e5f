"""No log of any part has a caller's text: gateway, worker, engine and callbacks, with a killed
engine, a killed Redis and failing receivers."""

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from contract.api_keys import ApiKeys, KeyTerms
from contract.connection import connect
from contract.keys import Keys
from contract.library import ensure_library
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.callbacks_process import callbacks_processes
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.fakes import HashModelOptions
from tests.fleet import WorkerProcess, fleet, until
from tests.gateway.conftest import make_settings, running_gateway
from tests.infra.processes import descendants

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.campaign]

FAILS, CRASHES = "\1", "\2"  # a prompt with it fails its job; with it the engine crashes
MODEL = HashModelOptions(bad_row_id=1, crash_id=2, step_s=0.01, eos_rate=0.0)
FAR = "https://receiver.invalid/"  # a name that never resolves


class Parts:
    """All processes, and a caller with a key. Every text that it sends contains a canary."""

    def __init__(
        self, http: httpx.AsyncClient, server: EmbeddedRedis, worker: WorkerProcess
    ) -> None:
        self.http, self.server, self.worker = http, server, worker
        self._numbers = itertools.count()

    def canary(self) -> str:
        return f"canary-{next(self._numbers)}"

    def call(self, before: str = "", **fields: Any) -> dict[str, Any]:
        return {
            "model": "m",
            "prompt": before + " ".join(self.canary() for _ in range(8)),
            "max_tokens": 30,
            "user": self.canary(),
            "stop": [self.canary()],
            "metadata": {self.canary(): self.canary()},
            **fields,
        }

    async def ask(self, body: dict[str, Any], **options: Any) -> httpx.Response:
        """A call, also with canaries in its headers and query."""
        names = ("idempotency-key", "cookie", "user-agent", "x-anything")
        headers = {name: self.canary() for name in names}
        path = f"/v1/completions?q={self.canary()}"
        return await self.http.post(path, json=body, headers=headers, **options)

    async def submit(self, body: dict[str, Any], **fields: Any) -> str:
        metadata = {self.canary(): self.canary()}
        job = {"endpoint": "/v1/completions", "body": body, "metadata": metadata, **fields}
        answer = await self.http.post("/v1/jobs", json=job)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def shown(self, job_id: str) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job

    async def ends(self, job_id: str) -> str:
        """The job's last state."""
        async with asyncio.timeout(60):
            while (status := (await self.shown(job_id))["status"]) in (  # noqa: ASYNC110
                "queued",
                "running",
            ):
                await asyncio.sleep(0.02)  # another process's state
        return str(status)


@asynccontextmanager
async def running_parts() -> AsyncIterator[tuple[Parts, str]]:
    """The parts, and the caller's API key."""
    keys = Keys("test")
    with EmbeddedRedis() as server:
        client = connect(server.url, Keys("test"))
        await ensure_library(client)
        api_key, _ = await ApiKeys(client, keys).create(KeyTerms(tenant="t"))
        await client.aclose()
        settings = make_settings(server.url, callback_allow=("127.0.0.1",), breaker_open_s=0.05)
        process = callbacks_processes(server.url, 1, retry_delays_s=(0.05, 0.05))
        async with fleet(server.url, 1, MODEL) as [worker], process:
            with running_gateway(settings) as url:
                headers = {"authorization": f"Bearer {api_key}"}
                async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                    await until(lambda: is_ready(http))
                    yield Parts(http, server, worker), api_key


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readyz")).status_code == 200


async def test_no_part_logs_what_callers_send(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """For each way a job can end or be rejected, with a real worker. The API key is nowhere in
    Redis."""
    caplog.set_level(logging.DEBUG)
    async with running_parts() as (parts, api_key):
        output = (await parts.ask(parts.call(stop=None))).json()["choices"][0]["text"]
        assert (await parts.ask(parts.call(FAILS))).status_code == 500
        assert (await parts.ask(parts.call("x" * 600))).status_code == 400
        assert await parts.ends(await parts.submit(parts.call(CRASHES))) == "failed"
        await cancels_and_expires(parts)
        await calls_back(parts)
        await loses_its_engine(parts)
        await loses_redis(parts)
        written = b"".join(path.read_bytes() for path in files_of(parts.server))
        assert b"canary-" in written  # prompts are kept there; keys are not
        assert api_key.encode() not in written
        assert api_key.rpartition("-")[2].encode() not in written
    captured = capfd.readouterr()
    lines = [f"{r.getMessage()} {r.exc_info}" for r in caplog.records if not is_ours(r)]
    text = "\n".join([captured.out, captured.err, *lines])
    for part in ("batchway.gateway", "workers.", "batchway.engine", "batchway.callbacks"):
        assert part in text or any(r.name.startswith(part) for r in caplog.records), part
    assert len(output) > 10
    for secret in ("canary-", SECRET, api_key, output[:8]):
        assert secret not in text


async def cancels_and_expires(parts: Parts) -> None:
    long = parts.call(max_tokens=250, min_tokens=250, stop=None)
    cancelled = await parts.submit(long)
    await parts.http.post(f"/v1/jobs/{cancelled}/cancel?why={parts.canary()}")
    assert await parts.ends(cancelled) == "cancelled"
    late = await parts.submit(long)
    await parts.http.patch(f"/v1/jobs/{late}", json={"deadline_s": 1})
    assert await parts.ends(late) == "expired"


async def calls_back(parts: Parts) -> None:
    """Receivers that accept, answer 410 or fail at every attempt; a name that does not resolve."""
    behaviours = {
        "/well": always(Answer()),
        "/gone": always(Answer(410)),
        "/bad": always(Answer(500)),
    }
    async with Receiver(behaviours) as receiver:
        for target in (*map(receiver.url, behaviours), FAR):
            url = f"{target}?token={parts.canary()}"
            callback = {"url": url, "secret": SECRET, "payload": "full"}
            job_id = await parts.submit(parts.call(), callback=callback)

            async def is_told(job_id: str = job_id) -> bool:
                shown = (await parts.shown(job_id))["callback"]
                return shown["state"] in ("delivered", "given_up")

            await until(is_told)


async def loses_its_engine(parts: Parts) -> None:
    """kill -9 of the engine during a stream, which continues."""
    job_id = await parts.submit(parts.call(max_tokens=200, min_tokens=200, stop=None))

    async def runs() -> bool:
        return (await parts.shown(job_id))["timings"]["first_token_at"] is not None

    await until(runs)
    for pid in descendants(parts.worker.pid):
        os.kill(pid, signal.SIGKILL)
    assert await parts.ends(job_id) == "succeeded"


async def loses_redis(parts: Parts) -> None:
    """kill -9 of Redis during a stream, which continues; other calls meanwhile are rejected."""
    body = parts.call(max_tokens=200, min_tokens=200, stop=None, stream=True)
    async with parts.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        assert (await anext(lines)).startswith(("data:", "id:", ":"))
        parts.server.kill()
        for _ in range(3):
            assert (await parts.ask(parts.call())).status_code == 503
        parts.server.start()
        assert [line async for line in lines if line.startswith("data:")][-1] == "data: [DONE]"


def files_of(server: EmbeddedRedis) -> Iterator[Any]:
    """Redis's files on disk: every write since it started."""
    return (path for path in server.files.rglob("*") if path.is_file())


def is_ours(record: logging.LogRecord) -> bool:
    """Whether the test's own client wrote the line."""
    return record.name.startswith(("httpx", "httpcore"))
