"""A Redis that answers, but not well, in front of a gateway and a worker: callers are told what is
wrong, and both go on by themselves when it is over."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
import redis

from infra.embedded_redis import EmbeddedRedis
from tests.chaos.proxy import Link
from tests.gateway.conftest import gateway_client

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

BODY = {"model": "m", "prompt": "ab", "max_tokens": 4}


@dataclass
class Patient:
    """A server, and the link through which it is called."""

    server: EmbeddedRedis
    link: Link

    def __post_init__(self) -> None:
        path = self.server.url.removeprefix("unix://")
        redis.Redis(unix_socket_path=path).acl_setuser(
            "admin", enabled=True, passwords=["+admin"], categories=["+@all"], keys=["*"]
        )
        self.admin = redis.Redis(unix_socket_path=path, username="admin", password="admin")

    def hang_up(self) -> None:
        for kind in ("normal", "pubsub"):
            self.admin.client_kill_filter(_type=kind, skipme=True)

    def set(self, name: str, value: str) -> None:
        self.admin.config_set(name, value)
        self.hang_up()

    def delay(self, delay_s: float) -> None:
        self.link.delay_s = delay_s


State = tuple[Callable[[Patient], object], Callable[[Patient], object], str]


def setting(name: str, bad: str, good: str, reason: str) -> State:
    return lambda it: it.set(name, bad), lambda it: it.set(name, good), reason


# How each begins and ends, and what callers are told.
STATES: dict[str, State] = {
    "a replica": (
        lambda it: it.admin.replicaof("127.0.0.1", "1"),
        lambda it: it.admin.replicaof("NO", "ONE"),
        "read-only replica",
    ),
    "another password": setting("requirepass", "secret", "", "refused the credentials"),
    "no more clients": setting("maxclients", "1", "10000", "does not answer"),
    "paused": (
        lambda it: it.admin.client_pause(600_000, all=False),
        lambda it: it.admin.client_unpause(),
        "does not answer",
    ),
    "out of memory": setting("maxmemory", "1mb", "200mb", "memory"),
    "slow": (lambda it: it.delay(0.2), lambda it: it.delay(0.0), ""),
    "gone": (lambda it: it.server.kill(), lambda it: it.server.start(), "does not answer"),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path, fsync="always") as server:
        yield server


@pytest.fixture
async def link(server: EmbeddedRedis) -> AsyncIterator[Link]:
    link = Link(lambda: Path(server.url.removeprefix("unix://")))
    await link.start()
    yield link
    await link.close()


async def answered(http: httpx.AsyncClient, status: int, text: str = "") -> None:
    """Waits for an answer with this status that contains the text."""
    async with asyncio.timeout(60):
        while True:
            answer = await http.post("/v1/completions", json=BODY)
            if answer.status_code == status and text in answer.text:
                return
            await asyncio.sleep(0.1)


async def test_each_state_is_told_and_outlived(server: EmbeddedRedis, link: Link) -> None:
    """The worker stays the same process, and writes no traceback."""
    patient = Patient(server, link)
    given = msgspec.json.encode({"redis_url": link.url}).decode()
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hash_worker", given),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with gateway_client(link.url) as http:
            http.timeout = httpx.Timeout(60)
            await answered(http, 200)
            for enter, leave, reason in STATES.values():
                enter(patient)
                await answered(http, 503 if reason else 200, reason)
                assert (await http.get("/livez")).status_code == 200
                leave(patient)
                await answered(http, 200)
        assert worker.returncode is None
    finally:
        worker.terminate()
        _, said = await worker.communicate()
    assert b"Traceback" not in said
