"""How much may wait in each lane, as an operator writes it: `batch=500000,interactive=2s`.

A number is tokens (prompts and output to expect), one with an `s` the predicted wait in seconds.
"""

import math
import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

_ENTRY = re.compile(r"([a-z][a-z0-9_-]{0,31})\s*=\s*(\d+|\d+(?:\.\d+)?s)")


class LaneBound(msgspec.Struct, frozen=True):
    """Of one lane; 0: no bound."""

    tokens: int = 0
    wait_s: float = 0.0


def parse_lane_bounds(entries: Iterable[str]) -> Mapping[str, LaneBound]:
    """By lane; a lane may have one entry of each kind. Raises ValueError."""
    bounds: dict[str, LaneBound] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"must be like batch=500000 or interactive=2s, not {entry!r}")
        lane, value = match[1], match[2]
        bound = bounds.get(lane, LaneBound())
        if value.endswith("s"):
            bounds[lane] = replace(bound, wait_s=float(value[:-1]))
        else:
            bounds[lane] = replace(bound, tokens=int(value))
    assert all(math.isfinite(bound.wait_s) for bound in bounds.values())
    return bounds
