"""An engine of several ranks: in one process group, and as two nodes over loopback."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from tests.infra.processes import any_alive, command_of, descendants, wait_until
from tests.ports import free_port
from tests.workers.vllm_engine.driven import Engine, job, options_of, started, workload_jobs
from workers.ipc.messages import EngineOptions

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]

PAIR = {"tensor_parallel_size": "2"}


@pytest.fixture(autouse=True)
def without_numa_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this vLLM binds each rank to a NUMA node, and refuses to run with fewer nodes."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


async def two_nodes(options: EngineOptions) -> tuple[Engine, Engine]:
    """The engine, and the process of the second node's rank, which starts first and waits."""
    address = f"127.0.0.1:{free_port()}"
    nodes = Engine(), Engine()
    for rank in (1, 0):
        fields = {"nodes": 2, "node_rank": rank, "master": address}
        await nodes[rank].start(msgspec.structs.replace(options, **fields))
    await nodes[0].until_ready()
    return nodes


async def test_two_ranks_generate_the_same_tokens_as_vllm_alone(
    model: Path, alone: list[list[int]]
) -> None:
    """Afterwards a rank is killed in the middle of a stream: all processes of the engine end."""
    engine = await started(options_of(model, **PAIR))
    tokens = await engine.run(*workload_jobs())
    assert [tokens[f"w-{number}", 0] for number in range(len(alone))] == alone

    processes = descendants(engine.client.pid)
    ranks = [pid for pid in processes if "Worker_TP" in command_of(pid)]
    assert len(ranks) == 2
    engine.client.send([job("cut", max_tokens=1900, temperature=0.0)])
    await engine.until_output()
    os.kill(ranks[1], signal.SIGKILL)
    await engine.client.end()
    assert await engine.client.stop() != 0
    wait_until(lambda: not any_alive(processes))


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_two_nodes_generate_the_same_tokens_as_vllm_alone(
    model: Path, alone: list[list[int]], lost: int
) -> None:
    """Afterwards one node is killed while no job runs: the other ends, too, with a status other
    than 0."""
    nodes = await two_nodes(options_of(model, **PAIR))
    tokens = await nodes[0].run(*workload_jobs())
    assert [tokens[f"w-{number}", 0] for number in range(len(alone))] == alone

    processes = [pid for node in nodes for pid in descendants(node.client.pid)]
    nodes[lost].client.kill()
    await nodes[1 - lost].client.end()
    assert await nodes[1 - lost].client.stop() != 0
    await nodes[lost].client.stop()
    wait_until(lambda: not any_alive(processes))
