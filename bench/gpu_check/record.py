"""What was found, in one JSON file and one page of tables that are written again after each figure.

Uses only the standard library.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_check.report import report


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one comparison."""

    passed: bool
    detail: str


class Unfinished(Exception):
    """A stage ends without a failure of ours: `state` in a word or two, and the reason."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


class Record:
    """Figures by stage. `end_s`: when the time is over, by the clock."""

    def __init__(
        self, folder: Path, end_s: float, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._end_s = end_s
        self._clock_s = clock_s
        self.stages: dict[str, dict[str, Any]] = {}

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - self._clock_s())

    def put(self, stage: str, **figures: Any) -> None:
        """Adds to a stage: dicts are merged, lists continued, other values replaced."""
        _merge(self.stages.setdefault(stage, {}), figures)
        _replace(self._folder / "gpu-check.json", json.dumps(self.stages, indent=1) + "\n")
        _replace(self._folder / "gpu-check.md", report(self.stages))

    def check(self, stage: str, name: str, finding: Finding) -> None:
        shown = {"name": name, "passed": finding.passed, "detail": finding.detail}
        self.put(stage, checks=[shown])

    def run(
        self, stage: str, needs_s: float, work: Callable[[], None], *, later_s: float = 0.0
    ) -> None:
        """Runs a stage and records how it ended. Skips it if it does not fit: it takes about
        `needs_s`, and what is more important and comes later `later_s`."""
        left_s = self.left_s
        if left_s < needs_s + later_s:
            kept = f" besides {later_s:.0f} s for later stages" if later_s else ""
            reason = f"needs about {needs_s:.0f} s{kept}; {left_s:.0f} s are left"
            self.put(stage, state="skipped", reason=reason)
            return
        print(f"{stage}: starts, {left_s:.0f} s are left", file=sys.stderr, flush=True)
        self.put(stage, state="interrupted")
        start_s = self._clock_s()
        state, reason = "done", ""
        try:
            work()
        except Unfinished as exc:
            state, reason = exc.state, str(exc)
        except TimeoutError:
            state, reason = "cut short", "the time was over"
        except Exception as exc:  # the other stages go on
            state, reason = "failed", f"{type(exc).__name__}: {exc}"
        self.put(stage, state=state, reason=reason, seconds=round(self._clock_s() - start_s, 1))

    def has_passed(self) -> bool:
        """Whether no stage failed, and no check."""
        return all(
            found.get("state") != "failed" and all(c["passed"] for c in found.get("checks", ()))
            for found in self.stages.values()
        )


def _merge(into: dict[str, Any], figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif isinstance(value, list):
            into[name] = [*into.get(name, ()), *value]
        else:
            into[name] = value


def _replace(path: Path, text: str) -> None:
    """A reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
