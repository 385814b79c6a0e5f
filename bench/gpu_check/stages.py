"""Runs each stage in a process of its own, within the time. Uses only the standard library."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_check.wheels import ROOT

NO_GPU = 2
# Seconds of each stage; what one leaves goes to the next. Together under ten minutes.
BUDGETS_S = {
    "kernels": 60.0,
    "decoding": 180.0,
    "http": 170.0,
    "transformers": 70.0,
    "strategies": 70.0,
    "sanitizer": 35.0,
}
# A stage starts nothing in its last seconds, so that it ends by itself.
_LAST_S = 5.0


def run_stages(
    folder: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    on_end: Callable[[], None],
    budgets_s: Mapping[str, float] = BUDGETS_S,
) -> bool:
    """Runs all stages with these arguments; calls `on_end` after each. Returns False if there is
    no GPU."""
    for name in BUDGETS_S:
        (folder / f"{name}.json").unlink(missing_ok=True)
    end_s = time.monotonic()
    for name, budget_s in budgets_s.items():
        end_s += budget_s
        path = folder / f"{name}.json"
        left_s = max(0.0, end_s - time.monotonic())
        status = _run(name, path, left_s, arguments, environment)
        if status == NO_GPU:
            return False
        if status is None:
            _note(path, "skipped", f"the rest, after {left_s:.0f} s")
        elif status:
            _note(path, "failed", f"ended with status {status}")
        on_end()
    return True


def read_figures(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each stage that has a file, with its figures."""
    for name in BUDGETS_S:
        path = folder / f"{name}.json"
        if path.exists():
            yield name, json.loads(path.read_text())


def _run(
    name: str, path: Path, left_s: float, arguments: Sequence[str], environment: Mapping[str, str]
) -> int | None:
    """The exit status; None if its time was up."""
    seconds = max(0.0, left_s - _LAST_S)
    command = [
        *(sys.executable, "-m", "bench.gpu_check.stage", name, "--out", str(path)),
        *("--seconds", f"{seconds:.0f}", *arguments),
    ]
    process = subprocess.Popen(  # noqa: S603  # our own arguments
        command, cwd=ROOT, env=environment, process_group=0
    )
    try:
        return process.wait(left_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the stage and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _note(path: Path, key: str, text: str) -> None:
    """Adds to the file of a stage that ended, or makes one."""
    empty: dict[str, Any] = {"checks": [], "failed": [], "skipped": []}
    figures = json.loads(path.read_text()) if path.exists() else empty
    figures[key].append(text)
    path.write_text(json.dumps(figures, indent=1) + "\n")
