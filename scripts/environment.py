"""Creates or updates .venv for scripts/setup. Prints a line per step; pip's output goes to a log.

Runs before anything is installed, so it uses only the standard library.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "batchway-setup"  # line 1: a hash of the sources of .venv; line 2: its extras
LOG = VENV / "setup.log"
PIP = (str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input")
NETWORK_ERRORS = re.compile(
    "NewConnectionError|ConnectTimeout|ProxyError|SSLError|ReadTimeout|NameResolution"
)
EMULATOR = "aws-sam-cli==1.170.0"  # its wheel contains Lambda's Runtime Interface Emulator
MACHINES = {"x86_64": "x86_64", "aarch64": "arm64"}  # the kernel's name -> the name that AWS uses


class StepFailed(Exception):
    """A command failed. The message is its output."""


def main(extras: Sequence[str]) -> None:
    """Installs these extras and updates installed ones; `dev` includes the tools of the tests."""
    torch = os.environ["BATCHWAY_TORCH"]
    sources = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    made_from = f"{torch} {hashlib.sha256(sources).hexdigest()} {ROOT}"
    stamp = STAMP.read_text().splitlines() if STAMP.is_file() else []
    there = stamp[1].split() if stamp[:1] == [made_from] else []
    if set(extras) <= set(there):
        return
    wanted = sorted({*extras, *there})
    try:
        VENV.mkdir(exist_ok=True)
        LOG.write_text("")
    except OSError:
        fail(f"cannot write to {VENV}: run it as the owner of {ROOT}, or clone to another folder.")
    STAMP.unlink(missing_ok=True)
    say("Setting up .venv: the first time takes some minutes, most of them for torch.")
    if not has_pip():
        make_venv()
    # Python compiles what it imports; all modules of torch and transformers take pip half a minute.
    install = (*PIP, "install", "--no-compile", "--progress-bar", "off")
    required(torch, [*install, torch])
    serving = f"batchway[{','.join(wanted)}]"
    required(serving, [*install, "-e", f".[{','.join(wanted)}]"])
    if "dev" in wanted:
        for name, get in {"promtool": get_promtool, "aws-lambda-rie": get_emulator}.items():
            get_tool(name, get)
    STAMP.write_text(f"{made_from}\n{' '.join(wanted)}\n")


def has_pip() -> bool:
    try:
        return subprocess.run([*PIP, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def make_venv() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail(
            f"{sys.executable} comes without venv: install it (on Debian and Ubuntu the package "
            "python3-venv)."
        )
    required("virtual environment", [sys.executable, "-m", "venv", str(VENV)])


def required(name: str, command: Sequence[str]) -> None:
    """Runs a step. If it fails, exits with a message that says what to do."""
    try:
        run(name, command)
    except StepFailed as failed:
        output = str(failed)
        if "No space left on device" in output:
            fail(f"{name}: the disk is full: torch and the packages beside it take some GB.")
        if NETWORK_ERRORS.search(output):
            fail(
                f"{name}: pip cannot reach a package index. Check the network, HTTPS_PROXY and "
                f"`pip config list`, then run the same command again. Log: {LOG}"
            )
        lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
        errors = [line for line in lines if line.lower().startswith("error")]
        fail(f"{name}: {(errors or lines)[-1]}. Log: {LOG}")


def run(name: str, command: Sequence[str]) -> None:
    """Runs a command; prints its name and duration, and logs its output. Raises StepFailed."""
    start_s, is_over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not is_over.wait(1.0):
            say(f"\r  {name:<34} {time.monotonic() - start_s:4.0f} s", end="")

    ticker = threading.Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        ticker.start()
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    finally:
        is_over.set()
    with LOG.open("a") as log:
        log.write(f"== {name}\n{done.stdout}")
    if sys.stderr.isatty():
        say("\r", end="")
    if done.returncode != 0:
        raise StepFailed(done.stdout)
    say(f"  {name:<34} {time.monotonic() - start_s:4.0f} s")


def get_tool(name: str, get: Callable[[str, Path], None]) -> None:
    """Installs a program that no package provides; without it the tests that run it are skipped."""
    if (BIN / name).exists():
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            get(name, Path(folder))
    except (StepFailed, OSError, LookupError, ValueError) as exc:
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        say(f"  {name}: not installed, its tests will be skipped: {lines[-1]}")


def get_promtool(name: str, folder: Path) -> None:
    """Extracts it from Debian's package prometheus; its own package lists make root needless."""
    if found := shutil.which(name):
        (BIN / name).symlink_to(found)
        return
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise StepFailed("this machine has no Debian packages: install promtool yourself")
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    options = f"-o Dir::State::Lists={folder}/lists -o Dir::Cache={folder}/cache"
    script = (
        f"cd {folder} && apt-get {options} -o Acquire::http::Timeout=30 -qq update && "
        f"apt-get {options} -qq download prometheus && dpkg-deb -x prometheus_*.deb files"
    )
    run(name, ["sh", "-c", script])
    shutil.copy(folder / "files" / "usr" / "bin" / name, BIN / name)


def get_emulator(name: str, folder: Path) -> None:
    """Lambda's Runtime Interface Emulator."""
    machine = MACHINES.get(platform.machine())
    if platform.system() != "Linux" or machine is None:
        raise StepFailed("AWS offers the emulator for Linux on x86_64 and arm64 only")
    only = ("--no-deps", "--only-binary=:all:", "--dest", str(folder))
    run(name, [*PIP, "download", *only, EMULATOR])
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (BIN / name).write_bytes(files.read(f"samcli/local/rapid/{name}-{machine}"))
    (BIN / name).chmod(0o755)


def fail(text: str) -> NoReturn:
    raise SystemExit(f"scripts/setup: {text}")


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
