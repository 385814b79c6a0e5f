"""A line that counts what is done, where a person looks on."""

import sys
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30


def progress_line(what: str, stream: TextIO | None = None) -> Callable[[int, int], None]:
    """Shows how many of all are done; on a terminal only."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        return lambda num_done, num_all: None

    def show(num_done: int, num_all: int) -> None:
        bar = "#" * (_WIDTH * num_done // num_all)
        end = "\n" if num_done == num_all else ""
        print(f"\r[{bar:.<{_WIDTH}}] {num_done} of {num_all} {what}", end=end, file=out, flush=True)

    return show
