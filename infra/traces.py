"""Traces of arrivals: times and lengths of requests, without text.

A header, then one row per request: time, prompt tokens, output tokens; times are seconds or ISO
dates. Also reads `.gz`.
"""

import csv
import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a file, starting at second 0. Raises ValueError that names the row."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    rows = list(csv.reader(io.StringIO(text)))[1:]
    arrivals = []
    for number, row in enumerate(rows, 2):
        try:
            arrivals.append(Arrival(_seconds(row[0]), int(row[1]), int(row[2])))
        except (ValueError, IndexError) as exc:
            raise ValueError(f"{path.name}: row {number}: {exc}") from exc
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s if arrivals else 0.0
    return [replace(arrival, at_s=arrival.at_s - first_s) for arrival in arrivals]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()  # microsecond precision


def with_gap(arrivals: Sequence[Arrival], gap_s: float) -> list[Arrival]:
    """Returns a trace, a gap, and the trace again."""
    shift_s = arrivals[-1].at_s + gap_s
    return [*arrivals, *(replace(one, at_s=one.at_s + shift_s) for one in arrivals)]
