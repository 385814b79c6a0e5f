"""Outcomes of delivery attempts, and the retry schedule: delays in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver accepted it."""

    note: str


@dataclass(frozen=True, slots=True)
class Failed:
    """It may succeed later. `retry_after_s`: the receiver's request."""

    note: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A retry cannot succeed: becomes a dead letter at once."""

    note: str


Outcome = Delivered | Failed | Refused


_MINUTE_S, _HOUR_S = 60.0, 3600.0

# After the first attempt, which is immediate.
RUNGS_S = (5.0, 5 * _MINUTE_S, 30 * _MINUTE_S, 2 * _HOUR_S, 5 * _HOUR_S, 10 * _HOUR_S, 10 * _HOUR_S)
JITTER = 0.2  # delays are up to this much longer, so that receivers are not called all at once
MAX_RETRY_AFTER_S = 12 * _HOUR_S
MAX_PROGRESS_FAILURES = 2  # start and progress messages are soon outdated


def next_delay_s(
    num_failures: int,
    random: Random,
    *,
    rungs_s: Sequence[float] = RUNGS_S,
    retry_after_s: float | None = None,
) -> float | None:
    """The wait after `num_failures` failures (from 1); None: give up. A receiver may ask for a
    longer wait, within bounds, but not for a shorter one."""
    if num_failures > len(rungs_s):
        return None
    delay_s = rungs_s[num_failures - 1] * (1 + JITTER * random.random())
    return max(delay_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After header (seconds or a date); None for anything else."""
    if not value:
        return None
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - now).total_seconds())
