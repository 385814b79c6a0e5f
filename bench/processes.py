"""Starts servers and programs, ends them with all they started, and counts their processor time.

Linux only: reads /proc.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
UP_IS_READY = r"batchway is ready: (\S+)"
# Part names of `batchway up` by a piece of the command line; the first match counts.
_PARTS = {
    "engine": "workers.engine_process.engine_loop",
    "worker's supervisor": "infra worker",
    "gateway": "infra gateway",
    "Redis": "redis",
    "Redis (valkey)": "valkey",
    "callbacks": "callback",
}
_NOT_INHERITED = ("REDIS_URL", "BATCHWAY_API_KEY")  # a private Redis, open to this process
_START_S = 600.0
_LOOK_S = 0.1
_GRACE_S = 15.0  # from SIGTERM to SIGKILL
_DEATH_S = 15.0  # from SIGKILL to the end, in which the driver frees memory
_NUM_LINES, _NUM_CHARACTERS = 8, 1500
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class NotStarted(Exception):
    """A server was not ready. The message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its address, its first process, and how long it took to start."""

    url: str
    pid: int
    start_s: float

    def client(self, timeout_s: float = 600.0) -> httpx.AsyncClient:
        """Returns a client of its API, with as many connections as calls."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=f"{self.url}/v1", timeout=timeout_s, limits=limits, trust_env=False
        )


@contextlib.contextmanager
def running_batchway(arguments: Sequence[str]) -> Iterator[Server]:
    """Starts `batchway up` with these arguments, and ends it at exit. Raises NotStarted."""
    command = [sys.executable, "-m", "infra", "up", "--port=0", *arguments]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(command, Path(folder) / "log", UP_IS_READY, _START_S) as server,
    ):
        yield server


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    log: Path,
    ready: str,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Starts a server, and ends it at exit. It is ready when its log has the expression `ready`,
    whose group becomes its address. Raises NotStarted, after `limit_s` at the latest."""
    start_s = time.monotonic()
    with started(command, log, environment) as process:
        while (address := address_of(process, log, ready)) is None:
            if time.monotonic() - start_s > limit_s:
                raise NotStarted(f"it was not ready within {limit_s:.0f} s: {tail(log)}")
            time.sleep(_LOOK_S)
        yield Server(address, process.pid, time.monotonic() - start_s)


def address_of(process: subprocess.Popen[str], log: Path, ready: str) -> str | None:
    """The address of a server that was started, as `running_server` finds it; None until it is
    ready. Raises NotStarted if it has ended."""
    found = re.search(ready, log.read_text(encoding="utf-8", errors="replace"))
    if found is None and process.poll() is not None:
        raise NotStarted(f"it ended with status {process.returncode}: {tail(log)}")
    return None if found is None else found[1]


@contextlib.contextmanager
def started(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    is_piped: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Starts a program, its output in `log`, or the standard output in a pipe. It gets SIGTERM at
    exit, and if this process is killed."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(  # noqa: S603  # our own arguments
            command,
            cwd=ROOT,
            env=kept | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else output,
            stderr=output,
            text=True,
            process_group=0,
            preexec_fn=end_with_parent,
        )
    try:
        yield process
    finally:
        _end(process)


def run_program(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    take: Callable[[str], object],
) -> int:
    """Gives each line of a program's standard output to `take`; returns its exit status. Raises
    TimeoutError after `limit_s`."""
    is_late = threading.Event()
    with started(command, log, is_piped=True) as process:
        assert process.stdout is not None

        def kill() -> None:
            is_late.set()
            kill_all(below(process.pid))

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            for line in process.stdout:
                take(line)
            status = process.wait()
        finally:
            timer.cancel()
            timer.join()
    if is_late.is_set():
        raise TimeoutError
    return status


def end_with_parent() -> None:
    """Lets this process get SIGTERM when its parent has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tail(log: Path) -> str:
    """The last lines of a log, in one."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return " / ".join(lines[-_NUM_LINES:])[-_NUM_CHARACTERS:]


def kill_all(pids: Sequence[int]) -> None:
    """Kills these processes, and waits until they have freed the device."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _have_ended(pids, _DEATH_S)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and those below it."""
    family = below(process.pid)
    process.terminate()
    if not _have_ended(family, _GRACE_S):
        kill_all([pid for pid in {*family, *below(process.pid)} if _runs(pid)])
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
        process.wait(_DEATH_S)
    if process.stdout is not None:
        process.stdout.close()


def _have_ended(pids: Sequence[int], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while any(map(_runs, pids)):
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _runs(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for does not."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def part_of(pid: int) -> str:
    """The name of the part of `batchway up`, or "others". Raises OSError if the process has
    ended."""
    command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    return next((part for part, text in _PARTS.items() if text in command), "others")


def pid_of(part: str, pid: int) -> int:
    """The first process of this part, below a process."""
    return next(each for each in below(pid) if part_of(each) == part)


def memory_bytes(pid: int, name: str = "VmRSS") -> int:
    """A field of /proc/PID/status: VmRSS is the resident memory, VmHWM its peak. Raises OSError if
    the process has ended."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("utf-8"), re.M)
    if found is None:
        raise ProcessLookupError(pid)
    return int(found[1]) * 1024


def forget_peak(pid: int) -> None:
    """Sets the peak of a process's memory to what it has now (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", "utf-8")


def child_peaks(pid: int) -> list[int]:
    """The peak memory of each process below one. Leaves out those that have not yet become another
    program, whose memory is that of their parent."""
    own, peaks = Path(f"/proc/{pid}/cmdline").read_bytes(), list[int]()
    for child in below(pid)[1:]:
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{child}/cmdline").read_bytes() != own:
                peaks.append(memory_bytes(child, "VmHWM"))
    return peaks


def own_processor_s(pid: int) -> float:
    """The processor time so far of one process, in seconds."""
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> dict[str, float]:
    """The processor time so far of a process and those below it, by part, and of this one."""
    times = os.times()
    by_part = {"the callers, in this process": times.user + times.system}
    for each in below(pid):
        with contextlib.suppress(OSError):  # it has ended
            used_s = own_processor_s(each)
            by_part[part_of(each)] = by_part.get(part_of(each), 0.0) + used_s
    return by_part


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on. Raises OSError if the process has ended."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
