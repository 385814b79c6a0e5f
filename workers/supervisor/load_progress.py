"""The sign that a worker is loading and gets on, for a health check in the same container."""

import os
import time
from pathlib import Path

AGAIN = "again"


class LoadProgress:
    """A file that holds the Unix time at which loading began, and AGAIN where an engine was ready
    before; it is touched at each step, and gone while the worker is not loading. `path`: '' for
    none."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def begin(self, what: str = "") -> None:
        """Begins, also where a former run of the container has left a file."""
        if self._path is not None:
            self._path.write_text(f"{int(time.time())} {what}")

    def note(self) -> None:
        """Notes a step. Begins again after an end."""
        if self._path is None:
            return
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self.begin(AGAIN)

    def end(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
