"""Limits on waiting and stored jobs: defaults, and the operator's settings.

An operator writes `batch=500000,interactive=2s`: a number counts tokens (prompts plus expected
output), one with an `s` is the predicted wait in seconds; 0 means no limit.
"""

import math
import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

_ENTRY = re.compile(r"([a-z][a-z0-9_-]{0,31})\s*=\s*(\d+|\d+(?:\.\d+)?s)")

INTERACTIVE_TARGET_S = 10.0  # seconds to the first token that an interactive user will wait
_PREDICTED_SHARE = 0.5  # of the available time, because throughput may halve while a job waits
# Bytes in Redis of a job that has run. Measured: 6.5 kB plus 13 bytes per output token, so 32 is an
# upper bound for jobs of 350 tokens or more.
BYTES_PER_TOKEN = 32
WAITING_SHARE = 0.4  # share of Redis's memory for the jobs waiting in a lane
STORED_FACTOR = 8  # times Redis's memory, because most stored data is in the object store
TENANT_SHARE = 0.5  # share of it for one tenant


class LaneBound(msgspec.Struct, frozen=True):
    """Limits of one lane; 0: no limit, None: the default."""

    tokens: int | None = None
    wait_s: float | None = None


def parse_lane_bounds(entries: Iterable[str]) -> Mapping[str, LaneBound]:
    """Limits by lane; a lane may have one entry of each kind. Raises ValueError."""
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
    assert all(math.isfinite(bound.wait_s or 0.0) for bound in bounds.values())
    return bounds


def default_wait_s(lane: str, sync_deadline_s: float) -> float:
    """The default limit of the predicted wait in seconds; 0 for `batch`, where nobody waits for a
    response. In other lanes callers wait at most until a call's deadline."""
    if lane == "batch":
        return 0.0
    target_s = INTERACTIVE_TARGET_S if lane == "interactive" else sync_deadline_s
    return min(target_s, sync_deadline_s) * _PREDICTED_SHARE


def tokens_in(memory_bytes: int) -> int:
    """How many tokens may wait in a lane, so that Redis has memory for their logs."""
    return int(memory_bytes * WAITING_SHARE / BYTES_PER_TOKEN)


def stored_bytes_beside(memory_bytes: int) -> int:
    """The bytes of jobs that may be stored, in Redis and its object store together. A Redis with
    less than 64 MiB counts as one of 64 MiB, because it rejects jobs by itself."""
    return max(memory_bytes, 2**26) * STORED_FACTOR
