"""A whole stack of real processes, while one user of Redis writes malformed data."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from contract.api_keys import ApiKeys, KeyTerms, Scope
from contract.connection import connect
from contract.errors import WireError
from contract.functions import Functions
from contract.keys import Keys
from contract.library import library_source
from infra.embedded_redis import EmbeddedRedis
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from tests.fakes import HashModelOptions
from tests.fleet import Program, until
from tests.hash_engine import HASH_MODEL_VARIABLE
from tests.hostile.mutations import Mutator
from tests.infra.test_redis_roles import make_users, role_url

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

CANARY = "hush-5e2c"  # in prompts
SEED = int(os.environ.get("HOSTILE_SEED", "1"))
NUM_ROUNDS = int(os.environ.get("HOSTILE_ROUNDS", "1"))
NUM_WRITES = 60  # of a round
LOOKS_A_ROUND = 3
ROLES = ("gateway", "worker", "callbacks", "pool", "housekeeper", "operator")
SLOW = HashModelOptions(step_s=0.01, eos_rate=0.0)
# Written once, at a start.
KEPT = (b":model:", b":models", b":tokenizer:", b":api_key", b":key_pepper")
LOOKS = ("/v1/models", "/metrics", "/readyz", "/livez", "/v1/jobs", "/v1/jobs/{id}")


@dataclass
class Stack:
    """Two workers, a gateway and callbacks, each under its own user, with their logs."""

    redis_url: str
    folder: Path
    programs: dict[str, Program] = field(default_factory=dict)

    def start(self, name: str, role: str, *words: str, **environ: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            environ["REDIS_URL"] = role_url(self.redis_url, role)
            self.programs[name] = Program(*words, environ=environ, output=log)

    def lost(self) -> list[str]:
        """Names of programs that have ended."""
        return [name for name, program in self.programs.items() if not program.is_alive]

    def log(self, name: str) -> bytes:
        return (self.folder / f"{name}.log").read_bytes()

    async def stop(self) -> list[int]:
        """Sends SIGTERM to all; returns their exit statuses."""
        return await asyncio.gather(*(program.stop() for program in self.programs.values()))


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A separate server: its users cannot share one that other tests empty."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as admin:
        make_users(admin, "test")
        admin.function_load(library_source())
        yield server


@pytest.fixture
async def stack(server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Stack]:
    stack = Stack(server.url, tmp_path)
    model = {HASH_MODEL_VARIABLE: msgspec.json.encode(SLOW).decode()}
    for name in ("worker-1", "worker-2"):
        worker = json.dumps({"redis_url": role_url(server.url, "worker"), "drain_s": 1.0})
        stack.start(name, "worker", "tests.hash_worker", worker, **model)
    settings = json.dumps({"redis_url": role_url(server.url, "callbacks"), "drain_s": 1.0})
    stack.start("callbacks", "callbacks", "tests.callbacks.callbacks_process", settings)
    gateway = ("infra", "gateway", "--namespace=test", "--port=0", "--drain-s=1")
    stack.start("gateway", "gateway", *gateway, BATCHWAY_CALLBACK_ALLOW="127.0.0.1")
    try:
        yield stack
    finally:
        await stack.stop()


async def gateway_address(stack: Stack) -> str:
    """The address in the gateway's log."""

    async def listens() -> bool:
        return b"listening on" in stack.log("gateway") or bool(stack.lost())

    await until(listens)
    found = re.search(rb"listening on (\S+) port (\d+)", stack.log("gateway"))
    assert found, stack.log("gateway").decode()
    return f"http://127.0.0.1:{int(found[2])}"


async def make_key(server: EmbeddedRedis) -> str:
    client = connect(server.url, Keys("test"))
    async with contextlib.aclosing(client):
        terms = KeyTerms(tenant="t", scopes=(Scope.ADMIN,))
        return (await ApiKeys(client, Keys("test")).create(terms))[0]


async def submit(http: httpx.AsyncClient, target: str, number: int) -> str | None:
    """Submits a job that runs for a while and has a callback. Returns None if it is rejected."""
    body = {"model": "m", "prompt": f"{CANARY} {number}", "max_tokens": 40 + 20 * number}
    callback = {"url": target, "secret": SECRET, "payload": "full", "events": ["job.started"]}
    job = {"endpoint": "/v1/completions", "body": body, "lane": "standard", "callback": callback}
    answer = await http.post("/v1/jobs", json=job)
    return answer.json()["id"] if answer.status_code == 202 else None


async def look_around(http: httpx.AsyncClient, job_ids: list[str | None]) -> None:
    """Sends requests of every kind. Any response will do."""
    for path in LOOKS:
        await http.get(path.format(id=job_ids[0]))
    for job_id in job_ids[:2]:
        with contextlib.suppress(httpx.ReadTimeout):  # a stream may wait for a lost job
            await http.get(f"/v1/jobs/{job_id}/events", timeout=0.3)
    with contextlib.suppress(httpx.ReadTimeout):
        body = {"model": "m", "prompt": "ab", "max_tokens": 2}
        await http.post("/v1/completions", json=body, timeout=1.0)


async def sweeps_again(server: EmbeddedRedis) -> None:
    """Fails if every sweep fails. One sweep may fail and repair the data for the next."""
    client, cause = connect(server.url, Keys("test")), [""]

    async def has_swept() -> bool:
        try:
            await Functions(client, Keys("test")).sweep()
        except WireError as exc:
            cause[0] = str(exc.__cause__)
            return False
        return True

    async with contextlib.aclosing(client):
        try:
            await until(has_swept, timeout_s=20)
        except TimeoutError:
            pytest.fail(f"every sweep fails: {cause[0]}")


def cleared(admin: redis.Redis, kept: dict[Any, Any]) -> None:
    """Deletes all keys, and restores those that a part writes only at its start."""
    admin.flushall()
    for key, dump in kept.items():
        admin.restore(key, 0, dump, replace=True)  # a part may have been faster


async def answers_again(http: httpx.AsyncClient, receiver: Receiver) -> None:
    """Checks that all parts work: a job is computed, and its callback is delivered."""
    body = {"model": "m", "prompt": "ab", "max_tokens": 4}

    async def is_answered() -> bool:
        return (await http.post("/v1/completions", json=body)).status_code == 200

    await until(is_answered)
    receiver.messages.clear()
    assert await submit(http, receiver.url("/"), 0) is not None
    await receiver.until(lambda: any(m.body["type"] == "job.succeeded" for m in receiver.messages))


@pytest.mark.campaign
@pytest.mark.parametrize("role", ROLES)
async def test_no_process_ends_while_a_role_writes_garbage(
    server: EmbeddedRedis, stack: Stack, role: str
) -> None:
    """While jobs run, are followed and have callbacks. No process logs what it could not read, and
    all parts work once the writes end."""
    async with Receiver({"/": always(Answer())}) as receiver:
        url, key = await gateway_address(stack), await make_key(server)
        headers = {"authorization": f"Bearer {key}"}
        admin = redis.Redis.from_url(server.url)
        user = redis.Redis.from_url(role_url(server.url, role))
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
            with contextlib.closing(admin), contextlib.closing(user):
                await answers_again(http, receiver)
                kept = {
                    key: admin.dump(key)
                    for key in admin.scan_iter(count=1000)
                    if any(word in key for word in KEPT)
                }
                mutator = Mutator(user, admin, Keys("test").tag, SEED)
                for _ in range(NUM_ROUNDS):
                    job_ids = [await submit(http, receiver.url("/"), n) for n in range(6)]
                    for _ in range(LOOKS_A_ROUND):
                        await asyncio.to_thread(mutator.write, NUM_WRITES // LOOKS_A_ROUND)
                        await look_around(http, job_ids)
                        lost = {name: stack.log(name)[-3000:].decode() for name in stack.lost()}
                        assert lost == {}, "\n".join(lost.values())
                    await sweeps_again(server)
                    cleared(admin, kept)
                    await answers_again(http, receiver)
                assert mutator.num_written == NUM_ROUNDS * NUM_WRITES
    assert set(await stack.stop()) == {0}
    for name in stack.programs:
        assert CANARY.encode() not in stack.log(name)
