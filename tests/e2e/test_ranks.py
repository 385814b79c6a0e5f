"""vLLM with two ranks behind a gateway: one rank is killed while calls stream."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from infra.embedded_redis import EmbeddedRedis
from tests.e2e.questions import LONG_COUNT
from tests.gateway.conftest import make_settings, running_gateway
from tests.infra.processes import any_alive, command_of, descendants, wait_until
from tests.streams import events_of
from tests.vllm_environment import vllm_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.anyio, pytest.mark.campaign]

BODIES: tuple[dict[str, Any], ...] = (
    {**LONG_COUNT, "max_tokens": 300},
    {**LONG_COUNT, "max_tokens": 300, "temperature": 1.0, "seed": 5, "ignore_eos": True},
    {**LONG_COUNT, "max_tokens": 300, "seed": 6, "presence_penalty": 1.0, "ignore_eos": True},
)


def start_worker(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "infra", "worker"),
            *("--kv-cache-gib=0.25", "--engine-arg=tensor_parallel_size=2"),
            *vllm_arguments(),
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(params=["one-machine", "two-nodes"])
def layout(request: pytest.FixtureRequest) -> str:
    """The layout of ranks; also the namespace, because a model stays known after its workers have
    left."""
    return str(request.param)


@pytest.fixture
def workers(
    layout: str, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The worker that takes jobs, and that of the second node if there is one."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # both ranks have the same cores
    nodes: list[tuple[str, ...]] = [()]
    if layout == "two-nodes":
        with socket.create_server(("127.0.0.1", 0)) as server:
            master = f"--master=127.0.0.1:{server.getsockname()[1]}"
        nodes = [("--nodes=2", f"--node-rank={rank}", master) for rank in (0, 1)]
    with ExitStack() as stack:
        started = []
        for rank, arguments in enumerate(nodes):
            redis = () if rank else (f"--redis-url={redis_server.url}", f"--namespace={layout}")
            started.append(stack.enter_context(start_worker(*redis, *arguments)))
        yield started
        processes = [pid for worker in started for pid in descendants(worker.pid)]
        for worker in started:
            worker.terminate()
        assert [worker.wait(timeout=60) for worker in started] == [0] * len(started)
        wait_until(lambda: not any_alive(processes))


def ranks_of(worker: subprocess.Popen[bytes]) -> list[int]:
    return [pid for pid in descendants(worker.pid) if "VLLM::Worker" in command_of(pid)]


async def test_a_rank_killed_in_the_middle_of_streams_changes_no_token(
    redis_server: EmbeddedRedis, layout: str, workers: list[subprocess.Popen[bytes]]
) -> None:
    """Greedy, sampled and with a penalty: the same tokens as without a fault."""
    with running_gateway(
        make_settings(redis_server.url, namespace=layout, sync_deadline_s=600)
    ) as url:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            async with asyncio.timeout(240):
                while True:  # until a worker has published its model
                    if (await http.get("/v1/models/demo")).status_code == 200:
                        break
                    await asyncio.sleep(0.2)
            expected = await asyncio.gather(*(streamed(http, body) for body in BODIES))
            killed = asyncio.Event()

            def kill() -> None:
                if not killed.is_set():
                    killed.set()
                    os.kill(ranks_of(workers[-1])[-1], signal.SIGKILL)

            found = await asyncio.gather(*(streamed(http, body, kill) for body in BODIES))
            assert killed.is_set()
            assert found == expected
            assert [len(tokens) for tokens in found] == [300] * 3


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], then: Any = None) -> list[int]:
    """The token ids of a stream. Calls `then` after the first."""
    token_ids: list[int] = []
    asked = {**body, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for event in events_of(answer):
            assert "choices" in event.data, event
            for choice in event.data["choices"]:
                token_ids += choice.get("token_ids") or []
            if then is not None and len(token_ids) > 40:
                then()
    return token_ids
