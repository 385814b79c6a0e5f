"""Summarises and shows results: percentiles, tables, JSON and progress. Uses only the standard
library, because adapters of other engines import it in their own environments."""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "p99.9": percentile(values, 0.999),
        "max": max(values, default=None),
    }


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def date(seconds: float | None) -> str:
    """Formats a Unix time to the minute, in UTC."""
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def write(result: object, text: str, json_out: str | None) -> None:
    """Prints the text and writes JSON to a private file; `-` prints JSON instead."""
    as_json = json.dumps(result, indent=2)
    print(as_json if json_out == "-" else text)
    if json_out not in (None, "-"):
        path = Path(str(json_out))
        path.touch(mode=0o600)
        path.write_text(as_json + "\n", encoding="utf-8")


_WIDTH = 30


def progress_line(what: str, stream: TextIO | None = None) -> Callable[[int, int], None]:
    """Shows progress on a terminal; does nothing elsewhere."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        return lambda num_done, num_all: None

    def show(num_done: int, num_all: int) -> None:
        bar = "#" * (_WIDTH * num_done // num_all)
        end = "\n" if num_done == num_all else ""
        print(f"\r[{bar:.<{_WIDTH}}] {num_done} of {num_all} {what}", end=end, file=out, flush=True)

    return show
