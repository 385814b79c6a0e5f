"""Arrival times of requests, in seconds from the start of a run."""

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.measure.workloads import BadWorkload

Process = Literal["poisson", "gamma", "constant"]


def draw_arrivals(
    num_requests: int, rate_per_s: float, process: Process, burstiness: float, seed: str
) -> list[float]:
    """Draws the arrivals of an open loop; a gap precedes the first.

    `burstiness` is the shape of the gaps' gamma distribution: 1 is Poisson, less is burstier, more
    is smoother.
    """
    rng = random.Random(seed)
    shape = 1.0 if process == "poisson" else burstiness
    arrivals, now_s = [], 0.0
    for _ in range(num_requests):
        is_even = process == "constant"
        now_s += 1 / rate_per_s if is_even else rng.gammavariate(shape, 1 / (rate_per_s * shape))
        arrivals.append(now_s)
    return arrivals


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a trace: time, prompt tokens, output tokens."""

    arrival_s: float
    prompt_tokens: int
    max_tokens: int


def read_trace(path: Path) -> list[TraceEntry]:
    """CSV with the heading arrival_s,prompt_tokens,max_tokens. Raises BadWorkload with the line."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise BadWorkload(f"{path} cannot be read: {exc}") from exc
    entries = [_entry(path, number, row) for number, row in enumerate(rows, 2)]
    if not entries:
        raise BadWorkload(f"{path} has no requests")
    return sorted(entries, key=lambda entry: entry.arrival_s)


def _entry(path: Path, line: int, row: dict[str, str]) -> TraceEntry:
    try:
        entry = TraceEntry(
            float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["max_tokens"])
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise BadWorkload(
            f"{path}, line {line}: wants the columns arrival_s, prompt_tokens and max_tokens, "
            "all numbers"
        ) from exc
    if not 0 <= entry.arrival_s < float("inf") or entry.prompt_tokens < 1 or entry.max_tokens < 1:
        least = "at least 0 seconds, 1 token of prompt, 1 of output"
        raise BadWorkload(f"{path}, line {line}: {least}")
    return entry
