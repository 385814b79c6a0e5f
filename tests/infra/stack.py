"""`batchway up` as a process, with its output."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from tests.fakes import HashModelOptions
from tests.hash_engine import HASH_MODEL_VARIABLE
from tests.infra.processes import any_alive, command_of, descendants, wait_until

MODEL = "m"


class Stack:
    """A running `batchway up`. `temp_dir` is where it and its children put temporary files;
    `prefix` a program that starts it."""

    def __init__(
        self,
        temp_dir: Path,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        self.temp_dir = temp_dir
        self.lines: list[str] = []
        ours = ("REDIS_URL", "PYTHONPATH", "BATCHWAY_API_KEY")
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "infra", "up", "--port=0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**inherited, "TMPDIR": str(temp_dir), **environ},
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, num_times: int = 1) -> str:
        """The line in which a text appears for the n-th time."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        wait_until(
            lambda: len(found()) >= num_times or self.process.poll() is not None,
            timeout_s=120,  # a start may be slow on a busy machine
        )
        assert len(found()) >= num_times, "\n".join(self.lines)
        return found()[num_times - 1]

    @property
    def url(self) -> str:
        """Its address, once it serves."""
        return self.wait_for("batchway is ready: ").split()[3]

    def children(self) -> list[int]:
        """All processes below it, and its reapers."""
        return descendants(self.process.pid)

    def pid_of(self, part: str) -> int:
        """The process whose command line contains a text."""
        [pid] = [pid for pid in self.children() if part in command_of(pid)]
        return pid

    def complete(self, prompt: str = "a prompt", max_tokens: int = 8) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": max_tokens},
            timeout=60,
        )

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Sends a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        return status

    def assert_left_nothing(self, children: list[int]) -> None:
        """No process, socket or temporary folder remains."""
        wait_until(lambda: not any_alive(children))
        wait_until(lambda: list(self.temp_dir.iterdir()) == [])

    def close(self) -> None:
        """Ends it by Ctrl-C if it still runs, and by another after a timeout."""
        children = self.children()
        for patience_s in (5, 30):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience_s)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        wait_until(lambda: not any_alive(children), timeout_s=60)
        self._reader.join(timeout=10)


@contextlib.contextmanager
def running_stack(
    *arguments: str,
    model: HashModelOptions | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Stack]:
    """Runs `batchway up` on the hash model; ends it at exit."""
    options = msgspec.json.encode(model or HashModelOptions()).decode()
    hash_model = (
        "--engine-module=tests.hash_engine",
        "--model=hash",
        f"--served-model-name={MODEL}",
    )
    with _running(
        [*hash_model, *arguments], {HASH_MODEL_VARIABLE: options, **(environ or {})}
    ) as stack:
        yield stack


@contextlib.contextmanager
def running_demo_stack(
    *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """Runs `batchway up` on the demo model, as a newcomer does, with a small KV cache."""
    with _running(["--kv-cache-gib=0.25", *arguments], environ or {}) as stack:
        yield stack


@contextlib.contextmanager
def running_fleet(
    file: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """Runs `batchway up --fleet`."""
    with _running([f"--fleet={file}", *arguments], environ or {}) as stack:
        yield stack


@contextlib.contextmanager
def running_stack_without_settings() -> Iterator[Stack]:
    """Runs `batchway up` on the demo model and a free port, with no other option."""
    with _running([], {}) as stack:
        yield stack


@contextlib.contextmanager
def _running(arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[Stack]:
    temp_dir = Path(tempfile.mkdtemp(prefix="bw-", dir="/tmp"))  # short, for sockets
    stack = Stack(temp_dir, arguments, environ)
    try:
        yield stack
    finally:
        stack.close()
        shutil.rmtree(temp_dir, ignore_errors=True)
