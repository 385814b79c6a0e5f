"""One stage's figures, in a JSON file that is written again after each of them."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one comparison."""

    passed: bool
    detail: str


class Results:
    """`figures` holds `checks`, `failed` and `skipped` besides what the stage puts there. Nothing
    is started after `end_s` of the clock."""

    def __init__(
        self,
        path: Path,
        say: Callable[[str], None],
        end_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._say = say
        self._end_s = end_s
        self._clock_s = clock_s
        self._took_s: dict[tuple[str, str], float] = {}
        self.figures: dict[str, Any] = {"checks": [], "failed": [], "skipped": []}

    def put(self, name: str, figure: object) -> None:
        self.figures[name] = figure
        self._write()

    def note(self, text: str) -> None:
        """Adds a line to the stage's log, and prints it."""
        self._say(text)
        self.put("log", [*self.figures.get("log", []), text])

    def skip(self, what: str) -> None:
        """Names what did not fit into the time."""
        if what not in self.figures["skipped"]:
            self.figures["skipped"].append(what)
            self._write()

    def fail(self, what: str, exc: Exception) -> None:
        """Names what could not be measured, and why."""
        self.figures["failed"].append(f"{what}: {reason(exc)}")
        self._write()

    @property
    def left_s(self) -> float:
        """The seconds until nothing is started any more."""
        return max(0.0, self._end_s - self._clock_s())

    def check(self, name: str, compare: Callable[[], Finding]) -> None:
        """Records the comparison; an exception counts as failure and does not stop the others."""
        if not self._has_time(("checks", name)):
            return
        try:
            finding = compare()
        except Exception as exc:  # a kernel's compiler may raise anything
            finding = Finding(False, reason(exc))
        self.figures["checks"].append(
            {"name": name, "passed": finding.passed, "detail": finding.detail}
        )
        self._write()

    def measure(self, group: str, name: str, compute: Callable[[], object]) -> None:
        """Adds what `compute` returns to the list of this name in the group. Skips it, by name,
        if the last one of this name took longer than what is left."""
        key = (group, name)
        if not self._has_time(key):
            return
        start_s = self._clock_s()
        self._say(f"{group}: {name}")
        try:
            value = compute()
        except Exception as exc:  # the other figures stay valid
            self.fail(f"{group}: {name}", exc)
            return
        self._took_s[key] = self._clock_s() - start_s
        self.figures.setdefault(group, {}).setdefault(name, []).append(value)
        self._write()

    def _has_time(self, key: tuple[str, str]) -> bool:
        if self._took_s.get(key, 0.0) < self.left_s:
            return True
        self.skip(": ".join(key))
        return False

    def _write(self) -> None:
        """A reader never sees half a file."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.figures, indent=1) + "\n")
        part.replace(self._path)


def reason(exc: BaseException) -> str:
    """The exception's type and its first line."""
    return f"{type(exc).__name__}: {''.join(str(exc).splitlines()[:1])}"
