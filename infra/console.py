"""Shows the lines of several processes in one terminal, each behind its name."""

import os
from collections.abc import Mapping
from typing import TextIO

_COLOURS = (36, 33, 35, 32, 34)  # cyan, yellow, magenta, green, blue
_NAME_WIDTH = len("batchway")


class Console:
    """Prints `name | line`; coloured on a terminal only, and never where NO_COLOR is set."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream
        self._is_coloured = stream.isatty() and not environ.get("NO_COLOR")
        self._colours: dict[str, int] = {}
        self._is_read = True

    def line(self, name: str, text: str) -> None:
        """Prints one line at once. That nobody reads it is no reason to stop."""
        if not self._is_read:
            return
        try:
            self._stream.write(f"{self._prefix(name)} {text}\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed terminal, a closed file
            self._is_read = False

    def _prefix(self, name: str) -> str:
        prefix = f"{name:<{_NAME_WIDTH}} |"
        if not self._is_coloured:
            return prefix
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{prefix}\x1b[0m"
