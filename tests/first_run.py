"""A newcomer's first steps, on a machine with Python and a C++ compiler only.

    python3 -m tests.first_run serve      scripts/serve in an empty clone
    python3 -m tests.first_run wheel      pip install of the wheel with [serve], then batchway up

Both then run the printed curl command, press Ctrl-C, and check that nothing is left. `--source` and
`--ref` name a repository and commit other than HEAD. Needs Linux and the standard library.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.infra.processes import wait_until

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
DEFAULT_PORT = 8000
NUM_SETUP_LINES = 8  # at most: progress without pip's output
FIRST_START_S = 1500.0  # torch may come over the network


class Failed(Exception):
    """The message says what was wrong, with the end of the output."""


class FirstRun:
    """A temporary folder with a clone, and an environment without anything of this project."""

    def __init__(self, folder: Path, source: str, ref: str) -> None:
        self.clone = folder / "clone"
        self.elsewhere = folder / "elsewhere"
        self.temp_dir = folder / "tmp"
        for path in (self.elsewhere, self.temp_dir):
            path.mkdir()
        run("git", "clone", "--quiet", "--no-checkout", source, str(self.clone))
        run("git", "-C", str(self.clone), "checkout", "--quiet", "--detach", ref)
        self.environ = bare_environ() | {
            "TMPDIR": str(self.temp_dir),
            "XDG_CACHE_HOME": str(folder / "cache"),  # no kernels from before
            "TORCHINDUCTOR_CACHE_DIR": str(
                folder / "cache"
            ),  # otherwise torch leaves a folder in TMPDIR
        }

    def serve(self) -> None:
        """The README's first command, unchanged if its port is free."""
        port = [] if is_free(DEFAULT_PORT) else ["--port=0"]
        lines = self._try_out([str(self.clone / "scripts" / "serve"), *port])
        setup = next(i for i, line in enumerate(lines) if line.startswith("batchway |"))
        if setup > NUM_SETUP_LINES:
            raise Failed(f"{setup} lines before it starts:\n" + "\n".join(lines[:setup]))

    def wheel(self) -> None:
        """`pip install 'batchway[serve]'` is enough, outside of any clone."""
        [torch] = re.findall(r"BATCHWAY_TORCH:-(.*)\}", (self.clone / "scripts/setup").read_text())
        torch = os.environ.get("BATCHWAY_TORCH") or torch
        dist, venv = self.elsewhere.parent / "dist", self.elsewhere.parent / "venv"
        pip = (str(venv / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(sys.executable, "-m", "venv", str(venv))
        run(*pip, "wheel", "--no-deps", "--wheel-dir", str(dist), str(self.clone))
        [wheel] = dist.glob("*.whl")
        run(*pip, "install", "--no-compile", torch)
        run(*pip, "install", "--no-compile", f"{wheel}[serve]")
        run(str(venv / "bin" / "python"), "-I", str(self.clone / "scripts" / "installation.py"))
        self._try_out([str(venv / "bin" / "batchway"), "up", "--port=0"])

    def _try_out(self, command: Sequence[str]) -> list[str]:
        """Starts a server, sends a request, and ends it by Ctrl-C. Returns its output."""
        server = Server(command, self.elsewhere, self.environ)
        try:
            curl = server.wait_for_curl()
            output = run("bash", "-c", f"{curl} --silent --show-error --max-time 120")
            answer = json.loads(output)["choices"][0]["message"]["content"]
            if ANSWER not in answer:
                raise Failed(f"{curl}\nanswered {output}")
            if shutil.which("g++") and (without := server.lines_with("in place of our")):
                raise Failed(without[0])
            if len(self._processes()) < 4:  # Redis, gateway, worker, engine at least
                raise Failed("its processes cannot be seen, so their end cannot be either")
            server.press_ctrl_c()
        finally:
            server.kill()
            for pid in (left := self._processes()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        files = [path.name for path in self.temp_dir.iterdir()]
        if left or files:
            raise Failed(f"left: processes {left}, files {files}")
        url = re.search(r"http://\S+", curl)
        assert url is not None
        if not is_free(urlsplit(url[0]).port or 0):
            raise Failed(f"something still listens at {url[0]}")
        return server.lines

    def _processes(self) -> list[int]:
        """All processes whose environment names our folder, whatever their parent."""
        mark = f"TMPDIR={self.temp_dir}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes() + b"\0":
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        return found


class Server:
    """A serving process in its own session, as in a terminal, and its output."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self._began_s = time.monotonic()
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            print(
                f"    {time.monotonic() - self._began_s:4.0f} s  {self.lines[-1][:150]}", flush=True
            )

    def lines_with(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    def wait_for_curl(self) -> str:
        wait_until(
            lambda: bool(self.lines_with("  curl ")) or self._process.poll() is not None,
            timeout_s=FIRST_START_S,
        )
        self._reader.join(timeout=0 if self._process.poll() is None else 10)
        if not (found := self.lines_with("  curl ")):
            raise Failed("it ended before it served")
        return found[0].strip()

    def press_ctrl_c(self) -> None:
        """Sends SIGINT to the whole process group, as a terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)
        if (status := self._process.wait(timeout=60)) != 0:
            raise Failed(f"exit status {status} after Ctrl-C")
        self._reader.join(timeout=10)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def bare_environ() -> dict[str, str]:
    """This process's environment without variables of batchway or of a Python environment."""
    ours = re.compile(r"BATCHWAY_.*|REDIS_URL|PYTHON.*|VIRTUAL_ENV|XDG_CACHE_HOME|TMPDIR")
    environ = {name: value for name, value in os.environ.items() if not ours.fullmatch(name)}
    if torch := os.environ.get("BATCHWAY_TORCH"):
        environ["BATCHWAY_TORCH"] = torch
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {"PIP_CACHE_DIR": f"{cache}/pip"} | environ


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.first_run")
    parser.add_argument("parts", nargs="+", choices=("serve", "wheel"), metavar="serve|wheel")
    parser.add_argument("--source", default=str(ROOT), help="a repository to clone")
    parser.add_argument("--ref", help="a commit of it (default: HEAD of the source)")
    options = parser.parse_args()
    ref = options.ref or run("git", "-C", options.source, "rev-parse", "HEAD").strip()
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="bw-", dir="/tmp") as folder:
            began_s = time.monotonic()
            try:
                getattr(FirstRun(Path(folder), options.source, ref), part)()
            except Failed as reason:
                print(f"first run of {part}: {reason}", file=sys.stderr)
                return 1
            print(f"first run of {part}: passed in {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
