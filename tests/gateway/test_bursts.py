"""Many calls at once: each waits for its turn, if what they hold fits the memory for that."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from contract.connection import end_tasks
from gateway import turns
from gateway.child_process import ChildPool
from gateway.turns import LEAST_WAITING_BYTES, Owner, Turns
from tests.fleet import until
from tests.gateway.conftest import Bearer, Gateways, error_of
from tests.gateway.fake_worker import LEASE_S, MODEL, FakeWorker

pytestmark = pytest.mark.anyio

_NUM_CALLS = 256
_BURNER = "while True: pass"


class _Watched:
    """What came and what began in a gateway, by tenant; it goes on while `gate` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        come, take = Turns.turn, ChildPool._taken

        @asynccontextmanager
        async def turn(turns: Turns, owner: Owner) -> AsyncIterator[None]:
            self.events.append(("came", owner.tenant))
            async with come(turns, owner):
                yield

        async def taken(pool: ChildPool, owner: Owner) -> Any:
            self.events.append(("began", owner.tenant))
            await asyncio.to_thread(self.gate.wait)
            return await take(pool, owner)

        patch.setattr(Turns, "turn", turn)
        patch.setattr(ChildPool, "_taken", taken)

    def num_begun(self, tenant: str) -> int:
        return self.events.count(("began", tenant))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watched]:
    found = _Watched(monkeypatch)
    yield found
    found.gate.set()


@contextlib.contextmanager
def full_cores() -> Iterator[None]:
    """A process for each core but at most two, which use them whole, each in a session of its own:
    Linux shares cores between sessions first."""
    command = [sys.executable, "-c", _BURNER]
    num = min(2, os.cpu_count() or 1)
    burners = [subprocess.Popen(command, start_new_session=True) for _ in range(num)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@asynccontextmanager
async def attended(worker: FakeWorker) -> AsyncIterator[None]:
    """The worker is there for longer than one heartbeat lasts."""

    async def beat() -> None:
        while True:
            await worker.beat()
            await asyncio.sleep(LEASE_S / 10)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await end_tasks(task)


def chat(number: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"{number}"}]}


async def post(http: httpx.AsyncClient, number: int, headers: dict[str, str]) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=chat(number), headers=headers, timeout=120)


@pytest.mark.campaign
async def test_a_burst_waits_its_turn_on_full_cores(
    worker: FakeWorker, gateways: Gateways, bearer: Bearer, watched: _Watched
) -> None:
    """256 chats of one tenant are all answered, and another tenant's chat among them begins after
    at most one of theirs."""
    many, one = await bearer("many"), await bearer("one")
    async with attended(worker), gateways(sync_deadline_s=110.0) as http:
        with full_cores():
            burst = [asyncio.create_task(post(http, i, many)) for i in range(_NUM_CALLS)]

            async def is_under_way() -> bool:
                return watched.num_begun("many") > _NUM_CALLS // 8

            await until(is_under_way)
            other = await post(http, _NUM_CALLS, one)
            answers = await asyncio.gather(*burst)
    refusals = [each.text for each in [*answers, other] if each.status_code != 200]
    assert not refusals
    came, began = watched.events.index(("came", "one")), watched.events.index(("began", "one"))
    assert watched.events[came:began].count(("began", "many")) <= 1
    assert watched.num_begun("many") == _NUM_CALLS


async def test_beyond_the_memory_of_what_waits_a_call_gets_503(
    worker: FakeWorker,
    gateways: Gateways,
    bearer: Bearer,
    watched: _Watched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Retry-After; the others are answered, and those of another tenant find room."""
    monkeypatch.setattr(turns, "MAX_WAITING_BYTES", 6 * LEAST_WAITING_BYTES)
    many, one = await bearer("many"), await bearer("one")
    async with gateways() as http:
        watched.gate.clear()
        burst = [asyncio.create_task(post(http, i, many)) for i in range(9)]

        async def are_refused() -> bool:
            return sum(task.done() for task in burst) == 4

        await until(are_refused)  # two begin, three wait
        other = asyncio.create_task(post(http, 9, one))

        async def has_begun() -> bool:
            return watched.num_begun("one") == 1

        await until(has_begun)
        watched.gate.set()
        answers = [*await asyncio.gather(*burst), await other]
    refused = [each for each in answers if each.status_code != 200]
    assert len(refused) == 4
    for each in refused:
        assert error_of(each) == (503, None, "preparing")
        assert int(each.headers["retry-after"]) >= 1
