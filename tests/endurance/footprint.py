"""The resources of processes and Redis at one moment, and whether they are released later.
Linux."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from gateway.child_process import _MAX_GIVEN_WAY, _MAX_IDLE
from infra.embedded_redis import EmbeddedRedis
from tests.infra.processes import command_of, descendants

_KIND_BY_COMMAND = {
    "infra up": "up",
    "infra gateway": "gateway",
    "infra worker": "supervisor",
    "infra callbacks": "callbacks",
    "tests.hash_engine": "engine",
    "workers.engine_process": "encoder's engine",
    "reaper": "reaper",
}
# The gateway's processes for untrusted input, by module. They are replaced where a request takes
# long, which on a busy machine any may.
_REPLACED = re.compile(r"runpy.* (gateway\.\S+)")
_MAX_WAITING = _MAX_IDLE + _MAX_GIVEN_WAY
_MIB = 2**20
# Keys of a model that may exist while nothing runs: idle lanes, what lanes are owed, and for a week
# what each tenant's outputs have told of their lengths; and the lock of RQ's maintenance, which a
# process for callbacks takes once it runs, on a busy machine after the first look.
_COMES_AND_GOES = re.compile(r":0}:(idle|owed|lengths):|^{rq}:clean_groups$")


@dataclass(frozen=True, slots=True)
class Process:
    """One process; `rss_bytes` is its resident memory."""

    kind: str
    pid: int
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of all processes. `redis_bytes` is the memory use that Redis reports."""

    processes: tuple[Process, ...]
    redis_bytes: int
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The growth that is no leak: memory kept by allocators, connections kept by pools, threads of
    asyncio's executor."""

    rss_bytes: int = 8 * _MIB
    rss_share: float = 0.1  # of what it was before
    num_fds: int = 8
    num_threads: int = 2 + min(32, (os.cpu_count() or 1) + 4)
    redis_bytes: int = _MIB


def take(server: EmbeddedRedis, parent_pid: int) -> Footprint:
    """The footprint of a process, all its descendants, and Redis. Processes that end meanwhile are
    left out."""
    pids = [parent_pid, *descendants(parent_pid)]
    found = [_process(_kind(pid), pid) for pid in pids]
    with redis.Redis.from_url(server.url) as client:
        memory: Any = client.info("memory")
        keys: Any = client.keys()
    processes = [one for one in (*found, _process("redis", server.pid)) if one is not None]
    return Footprint(tuple(processes), memory["used_memory"], frozenset(map(bytes.decode, keys)))


def compare(before: Footprint, after: Footprint, tolerance: Tolerance) -> list[str]:
    """A sentence for each resource that was not released."""
    found: list[str] = []
    then = {one.pid: one for one in before.processes}
    now = {one.pid: one for one in after.processes}
    ended = [then[pid] for pid in then.keys() - now.keys()]
    new = [now[pid] for pid in now.keys() - then.keys()]
    found += [f"{one.kind} {one.pid} has ended" for one in ended if not _is_replaced(one)]
    found += [f"{one.kind} {one.pid} is new" for one in new if not _is_replaced(one)]
    waiting = Counter(one.kind for one in after.processes if _is_replaced(one))
    found += [f"{num} processes {kind} wait" for kind, num in waiting.items() if num > _MAX_WAITING]
    both = sorted(then.keys() & now.keys())
    # Each descriptor of Redis is a connection, whose other end is a descriptor of another part.
    connections = sum(
        max(0, now[pid].num_fds - then[pid].num_fds) for pid in both if now[pid].kind != "redis"
    )
    for pid in both:
        num_fds = connections if now[pid].kind == "redis" else 0
        found += _grown(then[pid], now[pid], tolerance, num_fds)
    found += [
        f"Redis has a new key, {key}"
        for key in sorted(after.keys - before.keys)
        if not _COMES_AND_GOES.search(key)
    ]
    if after.redis_bytes > before.redis_bytes + tolerance.redis_bytes:
        found.append(f"Redis uses {after.redis_bytes} bytes, before {before.redis_bytes}")
    return found


def _grown(then: Process, now: Process, tolerance: Tolerance, more_fds: int = 0) -> list[str]:
    """`more_fds`: the number of additional descriptors allowed beside the tolerance."""
    most_fds = then.num_fds + more_fds + tolerance.num_fds
    most_rss = tolerance.rss_bytes + then.rss_bytes * (1 + tolerance.rss_share)
    checks = (
        ("bytes of memory", then.rss_bytes, now.rss_bytes, most_rss),
        ("file descriptors", then.num_fds, now.num_fds, most_fds),
        ("threads", then.num_threads, now.num_threads, then.num_threads + tolerance.num_threads),
    )
    return [
        f"{now.kind} {now.pid} has {value} {what}, before {before}"
        for what, before, value, most in checks
        if value > most
    ]


def _is_replaced(process: Process) -> bool:
    return process.kind.startswith("gateway.")


def _kind(pid: int) -> str:
    command = command_of(pid)
    if replaced := _REPLACED.search(command):
        return replaced[1]
    return next((kind for part, kind in _KIND_BY_COMMAND.items() if part in command), "other")


def _process(kind: str, pid: int) -> Process | None:
    folder = Path("/proc") / str(pid)
    try:
        lines = (folder / "status").read_text().splitlines()
        num_fds = len(list((folder / "fd").iterdir()))
    except OSError:
        return None
    status = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in status:  # it has ended
        return None
    rss_bytes = int(status["VmRSS"].split()[0]) * 1024
    return Process(kind, pid, rss_bytes, num_fds, int(status["Threads"]))
