"""How commands show a result: a table for people, JSON for programs."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first row being the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def date(seconds: float | None) -> str:
    """A Unix time to the minute, in UTC."""
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def write(result: object, text: str, json_out: str | None) -> None:
    """Prints the text, and writes JSON to a file for its owner alone; `-`: prints JSON instead."""
    as_json = json.dumps(result, indent=2)
    print(as_json if json_out == "-" else text)
    if json_out not in (None, "-"):
        path = Path(str(json_out))
        path.touch(mode=0o600)
        path.write_text(as_json + "\n")
