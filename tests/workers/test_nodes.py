"""Engine processes on several machines connect and lose each other; and a node that only
computes."""

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.fakes import HashModelOptions
from tests.hash_engine import HASH_MODEL_VARIABLE
from tests.hash_worker import hash_worker_settings
from tests.infra.processes import any_alive, command_of, descendants
from tests.ports import free_port
from workers.ipc.messages import EngineOptions
from workers.ipc.nodes import address_of, meet
from workers.supervisor.node import run_node
from workers.supervisor.supervisor import EXIT_LOAD_FAILED, EXIT_OK


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def options_of(rank: int, address: str, **fields: object) -> EngineOptions:
    own = {"model_path": f"model-{rank}", "nodes": 3, "node_rank": rank, "master": address}
    return EngineOptions(**(own | fields))  # type: ignore[arg-type]


def ignore(_: str) -> None:
    pass


def test_nodes_start_with_the_options_of_node_0_and_end_with_any_other() -> None:
    """Two connect before node 0 starts. So do strangers, which send nonsense, nothing, or a wrong
    rank."""
    address = free_address()
    lost = {rank: threading.Event() for rank in range(3)}
    listens = threading.Event()

    def say(_: str) -> None:
        listens.set()

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, options_of(1, address), ignore, lost[1].set)
        leader_options = options_of(0, address, dtype="float32", engine_args={"a": "b"})
        leader = pool.submit(meet, leader_options, say, lost[0].set)
        assert listens.wait(20)
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n\n", b"7\n", b"-1\n", b"0\n", b""):
            with socket.create_connection(address_of(address), 20) as stranger:
                stranger.sendall(nonsense)
        again = pool.submit(meet, options_of(2, address), ignore, lost[2].set)
        found = [node.result(20) for node in (leader, first, again)]

    for rank, options in enumerate(found):
        assert (options.dtype, options.engine_args) == ("float32", {"a": "b"})
        assert options.node_rank == rank
        assert options.model_path == f"model-{rank}"
        assert options.master == found[0].master != address  # a port that is free for torch
    assert not any(event.is_set() for event in lost.values())


def test_node_0_learns_that_another_node_has_ended() -> None:
    address, lost, listens = free_address(), threading.Event(), threading.Event()

    def say(_: str) -> None:
        listens.set()

    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(meet, options_of(0, address, nodes=2), say, lost.set)
        assert listens.wait(20)
        with socket.create_connection(address_of(address), 20) as node:
            node.sendall(b"1\n")
            assert leader.result(20).nodes == 2
            assert not lost.is_set()
    assert lost.wait(20)


def test_a_node_learns_that_node_0_has_ended() -> None:
    """Also if node 0 ends before it has sent its options, and again after the next start."""
    lost = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        node = pool.submit(meet, options_of(1, address, nodes=2), ignore, lost.set)
        server.accept()[0].close()
        link, _ = server.accept()
        with link:
            link.sendall(msgspec.json.encode(options_of(0, "host:1", nodes=2)) + b"\n")
            assert node.result(20) == options_of(1, "host:1", nodes=2)
            assert not lost.is_set()
    assert lost.wait(20)


def test_an_address_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            meet(options_of(0, address), ignore, ignore)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_node_starts_its_ranks_again_until_it_is_asked_to_end() -> None:
    """The node has no Redis. Killing its process stands for the end of node 0's engine."""
    running = asyncio.create_task(run_node(hash_worker_settings("")))
    try:
        first = await rank_process(running)
        os.kill(first, signal.SIGKILL)
        second = await rank_process(running, after=first)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == EXIT_OK
        assert not any_alive([first, second])
    finally:
        release_signals()


@pytest.mark.anyio
async def test_a_node_whose_model_is_refused_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        HASH_MODEL_VARIABLE, msgspec.json.encode(HashModelOptions(refuses="no model")).decode()
    )
    settings = hash_worker_settings("")
    try:
        assert await run_node(settings) == EXIT_LOAD_FAILED
    finally:
        release_signals()


async def rank_process(running: asyncio.Task[int], after: int = 0) -> int:
    """The node's engine process, other than `after`."""
    async with asyncio.timeout(30):
        while not running.done():
            found = [
                pid
                for pid in await asyncio.to_thread(descendants, os.getpid())
                if pid != after and "tests.hash_engine" in command_of(pid)
            ]
            if found:
                return found[0]
            await asyncio.sleep(0.05)
    raise AssertionError("the node has ended")


def release_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
