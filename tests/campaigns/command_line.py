"""The parts shared by the long runs: options, progress, signals, figures and exit status."""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

_PROGRESS_S = 10.0  # between two lines without a terminal
EXIT_INTERRUPTED = 130


class Report(Protocol):
    """The result of a run. `violations` are sentences; the other figures go into table and JSON."""

    @property
    def violations(self) -> list[str]: ...

    def figures(self) -> dict[str, Any]: ...


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options common to all runs."""
    parser = argparse.ArgumentParser(prog=f"scripts/{name}", description=description)
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    return parser


def run(campaign: Callable[[], Awaitable[Report]], json_path: Path | None) -> int:
    """Runs it and prints the result. Returns 1 after a violation, 130 after a Ctrl-C."""
    started_s = time.monotonic()
    try:
        report = asyncio.run(_until_interrupted(campaign))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted: all processes are ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    figures = {"took_s": round(time.monotonic() - started_s, 1), **report.figures()}
    figures["violations"] = report.violations
    if sys.stderr.isatty():
        print(file=sys.stderr)  # behind the progress
    print(as_table(figures))
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if report.violations else 0


async def _until_interrupted(campaign: Callable[[], Awaitable[Report]]) -> Report:
    """Also ends at SIGTERM, and at a SIGINT that a background shell had ignored."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await campaign()


def as_table(figures: dict[str, Any]) -> str:
    """One line for each figure. Nested figures are indented, lists of figures are counted."""
    lines: list[str] = []
    for name, value in figures.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            lines += [label, *(f"  {_line(str(key), nested)}" for key, nested in value.items())]
        elif isinstance(value, list):
            sentences = [f"  {item}" for item in value[:50] if isinstance(item, str)]
            lines += [_line(label, len(value)), *sentences]
        else:
            lines.append(_line(label, value))
    return "\n".join(lines)


def _line(label: str, value: object) -> str:
    return f"{label:<40} {value!s:>14}"


class Progress:
    """One line on stderr: updated in place on a terminal, printed now and then elsewhere."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._is_terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next_s:
            print(text, file=sys.stderr, flush=True)
            self._next_s = time.monotonic() + _PROGRESS_S


def silent(text: str) -> None:
    """The progress of a run without an observer."""
