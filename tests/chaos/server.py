"""The campaign's Redis: killed, stopped, out of memory, with power cuts, and with failovers.

A power cut is a kill -9 after which the append-only file is cut where it was last known to be on
the disk. kill -9 alone loses nothing, since the kernel keeps what was written.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import redis.asyncio

from infra.embedded_redis import EmbeddedRedis, Fsync
from tests.chaos.ledger import Cut
from tests.chaos.proxy import Link

FSYNC_EVERY_S = 1.0  # what `everysec` may lose
LOSS_S = 3.0  # and with the two seconds by which Redis delays a write while the disk is busy
MAX_LAG_S = 0.5  # of a replica
_SAMPLE_S = 0.05


class ChaosRedis:
    """One server on one data directory. `cuts_s` holds each power cut and failover (monotonic)."""

    def __init__(self, data_dir: Path, fsync: Fsync, rng: random.Random) -> None:
        self.fsync = fsync
        self.is_busy = False
        self.cuts_s: list[Cut] = []
        self._base_dir = data_dir
        self._data_dir = data_dir
        self._num_failovers = 0
        self._lock = threading.Lock()
        self._is_over = False
        self._embedded = EmbeddedRedis(data_dir, fsync=fsync)
        self._rng = rng
        self._sizes: deque[tuple[float, str, int]] = deque()  # (time, file, bytes)
        self._sampler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._start)
        self._sampler = self._sampler or asyncio.create_task(self._sample())

    def stop(self) -> None:
        """For good: a start that is under way in a thread is waited for, and none follows."""
        if self._sampler is not None:
            self._sampler.cancel()
        with self._lock:
            self._is_over = True
            if self._embedded.is_running:
                os.kill(self._embedded.pid, signal.SIGCONT)
            self._embedded.stop()

    def _start(self) -> None:
        with self._lock:
            if not self._is_over:
                self._embedded.start()

    def _kill(self) -> None:
        with self._lock:
            if not self._is_over:
                self._embedded.kill()

    @property
    def url(self) -> str:
        return self._embedded.url

    @property
    def socket_path(self) -> Path:
        return Path(self.url.removeprefix("unix://"))

    def client(self) -> redis.asyncio.Redis:
        """A client without a link, for observers."""
        return redis.asyncio.Redis.from_url(self.url, protocol=2)

    async def kill(self, away_s: float) -> None:
        """kill -9. The server starts again with its file as the kernel has it."""
        await asyncio.to_thread(self._kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(self._start)

    async def pause(self, seconds: float) -> None:
        os.kill(self._embedded.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(self._embedded.pid, signal.SIGCONT)

    async def fill(self, seconds: float) -> None:
        """Makes the memory full, so that writes are refused for a while."""
        async with self.client() as client:
            await client.config_set("maxmemory", 1)
            await asyncio.sleep(seconds)
            await client.config_set("maxmemory", 0)

    async def cut_power(self, links: Sequence[Link], away_s: float) -> int:
        """Returns the number of lost bytes of the file."""
        begun_s = time.monotonic()
        keep = self._keep_acknowledged if self.fsync == "always" else self._keep_synced
        path, num_bytes = await keep(links)
        lost = path.stat().st_size - num_bytes
        os.truncate(path, num_bytes)
        self.cuts_s.append(Cut(begun_s - LOSS_S, time.monotonic()))
        self._sizes.clear()
        for link in links:
            link.drop_all()  # with the replies that they hold
            link.passes_replies.set()
        await asyncio.sleep(away_s)
        await asyncio.to_thread(self._start)
        return lost

    async def fail_over(self, links: Sequence[Link], load_s: float) -> int:
        """A replica joins, follows for `load_s`, and takes over from the killed primary. Returns
        how many bytes of the primary's log of commands it had not received."""
        self._num_failovers += 1
        data_dir = self._base_dir.with_name(f"{self._base_dir.name}-{self._num_failovers}")
        replica = EmbeddedRedis(data_dir, fsync=self.fsync)
        await asyncio.to_thread(replica.start)
        path = self.socket_path
        link = Link(lambda: path)
        await link.start()
        async with (
            self.client() as old,
            redis.asyncio.Redis.from_url(replica.url, protocol=2) as new,
        ):
            await new.replicaof("127.0.0.1", link.port)
            while (await new.info("replication"))["master_link_status"] != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(load_s)
            begun_s = time.monotonic()
            link.passes_replies.clear()  # what follows does not reach the replica
            await asyncio.sleep(self._rng.uniform(0.1, MAX_LAG_S))
            written = int((await old.info("replication"))["master_repl_offset"])
            await asyncio.to_thread(self._kill)
            await link.close()
            await new.replicaof("NO", "ONE")
            lost = written - int((await new.info("replication"))["master_repl_offset"])
        with self._lock:
            self._embedded.stop()
            self._embedded, self._data_dir = replica, data_dir
            if self._is_over:
                replica.stop()
        self.cuts_s.append(Cut(begun_s - LOSS_S, time.monotonic()))
        self._sizes.clear()
        for link in links:
            link.drop_all()
        return max(0, lost)

    async def _keep_acknowledged(self, links: Sequence[Link]) -> tuple[Path, int]:
        """Kills the server. Keeps all acknowledged writes and a random part of the others. With
        `always` the reply follows the fsync, so no acknowledged write may be lost."""
        for link in links:
            link.passes_replies.clear()
        path = self._file()
        answered = path.stat().st_size  # what was answered until now lies before this
        await asyncio.sleep(self._rng.uniform(0.02, 0.1))
        await asyncio.to_thread(self._kill)
        if self._file() != path:
            path, answered = self._file(), self._file().stat().st_size
        return path, self._rng.randint(answered, path.stat().st_size)

    async def _keep_synced(self, links: Sequence[Link]) -> tuple[Path, int]:
        """Kills the server. Keeps what its file held up to a second ago."""
        await asyncio.to_thread(self._kill)
        path, since_s = self._file(), time.monotonic() - self._rng.uniform(0, FSYNC_EVERY_S)
        sizes = [size for at, name, size in self._sizes if name == path.name and at >= since_s]
        return path, min(sizes, default=path.stat().st_size)

    def _file(self) -> Path:
        """The current append-only file."""
        files = (self._data_dir / "appendonlydir").glob("*.incr.aof")
        return max(files, key=lambda path: int(path.name.split(".")[-3]))

    async def _sample(self) -> None:
        while True:
            now_s = time.monotonic()
            try:
                path = self._file()
                self._sizes.append((now_s, path.name, path.stat().st_size))
            except (OSError, ValueError):
                pass  # between two files, or before the first
            while self._sizes and self._sizes[0][0] < now_s - 2 * FSYNC_EVERY_S:
                self._sizes.popleft()
            await asyncio.sleep(_SAMPLE_S)
