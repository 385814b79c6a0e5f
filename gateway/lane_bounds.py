"""How much may wait in each lane, and be stored: the defaults, and what an operator writes.

An operator writes `batch=500000,interactive=2s`: a number is tokens (prompts and output to expect),
one with an `s` the predicted wait in seconds; 0 is no bound.
"""

import math
import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

_ENTRY = re.compile(r"([a-z][a-z0-9_-]{0,31})\s*=\s*(\d+|\d+(?:\.\d+)?s)")

INTERACTIVE_TARGET_S = 10.0  # to the first token: as long as somebody who watches keeps waiting
_PREDICTED_SHARE = 0.5  # of the time that there is: rates may halve while a job waits
# In Redis, of a job that has run: measured as 6.5 kB and 13 bytes for each token of its output, so
# it is less for jobs of 350 tokens and more.
BYTES_PER_TOKEN = 32
WAITING_SHARE = 0.4  # of the memory of Redis, for what waits in a lane
STORED_FACTOR = 8  # most of what is kept of jobs lies in the object store, not in Redis
TENANT_SHARE = 0.5  # of that, for one tenant


class LaneBound(msgspec.Struct, frozen=True):
    """Of one lane; 0: no bound, None: nothing is said."""

    tokens: int | None = None
    wait_s: float | None = None


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
    assert all(math.isfinite(bound.wait_s or 0.0) for bound in bounds.values())
    return bounds


def default_wait_s(lane: str, sync_deadline_s: float) -> float:
    """The longest predicted wait. Nobody waits for what is in `batch`; in other lanes callers do,
    until the deadline of a call."""
    if lane == "batch":
        return 0.0
    target_s = INTERACTIVE_TARGET_S if lane == "interactive" else sync_deadline_s
    return min(target_s, sync_deadline_s) * _PREDICTED_SHARE


def tokens_in(memory_bytes: int) -> int:
    """How many tokens may wait in a lane so that Redis has memory for their logs."""
    return int(memory_bytes * WAITING_SHARE / BYTES_PER_TOKEN)


def stored_bytes_beside(memory_bytes: int) -> int:
    """How many bytes of all jobs may be kept, in a Redis of this memory and its object store: as of
    64 MiB where it has less, for then it refuses jobs by itself."""
    return max(memory_bytes, 2**26) * STORED_FACTOR
