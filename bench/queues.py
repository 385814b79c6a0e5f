"""batchway's functions beside BullMQ, SAQ and RQ on one private server: python -m bench.queues

The queues take turns in each round on an emptied server; figures are medians. Each client is a task
of one process (RQ: a thread), so a rate says as much of the client library as of the queue; `server
µs` is the processor time of the server for one job. Needs node and npm, and makes an environment
with pinned packages in a folder that it keeps.

batchway admits, ages, meters and logs each job and keeps its result; its `finish` claims and ends
one job at a time, `finish16` up to 16 in a call, as its workers do.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from bench.processes import ROOT
from bench.tables import markdown_table
from infra.embedded_redis import EmbeddedRedis

_PYTHON_PACKAGES = ("saq==0.26.4", "rq==3.0.0", "redis==8.1.0", "typing_extensions==4.16.0")
_NODE_PACKAGES = ("bullmq@6.7.0", "ioredis@6.0.0")
_READY = "ready"
_PEERS = ROOT / "bench/queue_peers"
_NUM_WAITING = 10_000
_LIMIT_S = 180.0
NUM_JOBS = {"batchway": 2_000, "bullmq": 2_000, "saq": 1_000, "rq": 500}
NUM_CLIENTS = (1, 4, 32)

Row = tuple[str, int, int]  # action, clients, jobs waiting before


@dataclass(frozen=True, slots=True)
class Figure:
    """Of one run: jobs or appends per second, and the server's processor time for each."""

    rate: float
    server_us: float


class Server:
    """The server that all queues share in turn."""

    def __init__(self, server: EmbeddedRedis, folder: Path) -> None:
        self._path = server.url.removeprefix("unix://")
        self._client = redis.Redis.from_url(server.url)
        self._folder = folder

    def empty(self) -> None:
        self._client.flushall()

    def used_bytes(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def run(self, peer: str, action: str, num_clients: int, num_jobs: int) -> Figure:
        """Raises CalledProcessError, TimeoutExpired."""
        before_s = self._processor_s()
        done = subprocess.run(  # noqa: S603
            [*self._program(peer), self._path, action, str(num_clients), str(num_jobs)],
            cwd=self._folder if peer == "bullmq" else ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_LIMIT_S,
        )
        server_s = self._processor_s() - before_s
        return Figure(num_jobs / float(done.stdout.split()[-1]), server_s * 1e6 / num_jobs)

    def _program(self, peer: str) -> list[str]:
        if peer == "batchway":
            return [sys.executable, "-m", "bench.queue_peers.with_batchway"]
        if peer == "bullmq":
            return ["node", str(_PEERS / "bullmq.mjs")]
        return [str(self._folder / "bin/python"), str(_PEERS / f"with_{peer}.py")]

    def _processor_s(self) -> float:
        cpu = self._client.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def make_environment(folder: Path) -> None:
    if (folder / _READY).exists():
        return
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-qq"]
    subprocess.run([*pip, *_PYTHON_PACKAGES], check=True)  # noqa: S603
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*npm, *_NODE_PACKAGES], check=True)  # noqa: S603
    (folder / _READY).touch()


def measure(server: Server, peer: str) -> Iterator[tuple[Row, Figure]]:
    """One turn of a queue."""
    num_jobs = NUM_JOBS[peer]
    actions = ("finish", "finish16") if peer == "batchway" else ("finish",)
    for num_clients in NUM_CLIENTS:
        for action in actions:
            server.empty()
            yield ("enqueue", num_clients, 0), server.run(peer, "enqueue", num_clients, num_jobs)
            yield (action, num_clients, 0), server.run(peer, action, num_clients, num_jobs)
        server.empty()
        yield ("append", num_clients, 0), server.run(peer, "append", num_clients, num_jobs)
    server.empty()
    empty_bytes = server.used_bytes()
    server.run(peer, "enqueue", 32, _NUM_WAITING)
    used = (server.used_bytes() - empty_bytes) / _NUM_WAITING
    yield ("bytes per waiting job", 0, 0), Figure(used, 0)
    yield ("enqueue", 4, _NUM_WAITING), server.run(peer, "enqueue", 4, num_jobs)
    for action in actions:
        yield (action, 4, _NUM_WAITING), server.run(peer, action, 4, num_jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/batchway-queues")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", choices=NUM_JOBS, help="default: all")
    given = parser.parse_args()
    make_environment(given.folder.absolute())
    figures: dict[Row, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    with EmbeddedRedis() as redis_server:
        server = Server(redis_server, given.folder.absolute())
        for number in range(given.rounds):
            for peer in given.peer or NUM_JOBS:
                for row, figure in measure(server, peer):
                    figures[row][peer].append(figure)
                    line = {"round": number, "peer": peer, "row": row, "rate": round(figure.rate)}
                    print(json.dumps(line), file=sys.stderr, flush=True)
    print(table(figures))
    print(f"\n{os.cpu_count()} cores, {platform.processor() or platform.machine()}")


def table(figures: dict[Row, dict[str, list[Figure]]]) -> str:
    """Rates with the server's µs in brackets."""
    rows = [["action", "clients", "waiting", *NUM_JOBS]]
    for (action, num_clients, num_waiting), by_peer in sorted(figures.items()):
        cells = []
        for peer in NUM_JOBS:
            found = by_peer.get(peer, [])
            cells.append(_cell(found) if found else "-")
        rows.append([action, f"{num_clients or ''}", f"{num_waiting:,}", *cells])
    return markdown_table(rows)


def _cell(found: list[Figure]) -> str:
    rate = statistics.median(figure.rate for figure in found)
    server_us = statistics.median(figure.server_us for figure in found)
    return f"{rate:,.0f} ({server_us:,.0f} µs)" if server_us else f"{rate:,.0f}"


if __name__ == "__main__":
    main()
