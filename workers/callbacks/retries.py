"""Outcomes of delivery attempts, and the delays between attempts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver accepted the message."""

    note: str


@dataclass(frozen=True, slots=True)
class DeliveryFailed:
    """A later attempt may succeed. `retry_after_s`: the wait that the receiver asked for."""

    note: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeliveryRefused:
    """No attempt can succeed: the message becomes a dead letter at once."""

    note: str


Outcome = Delivered | DeliveryFailed | DeliveryRefused


_MINUTE_S, _HOUR_S = 60.0, 3600.0

# Delays after the first failure, the second, and so on. The first attempt is immediate.
RETRY_DELAYS_S = (
    5.0,
    5 * _MINUTE_S,
    30 * _MINUTE_S,
    2 * _HOUR_S,
    5 * _HOUR_S,
    10 * _HOUR_S,
    10 * _HOUR_S,
)
JITTER = 0.2  # a random share of up to this is added, so that retries spread
MAX_RETRY_AFTER_S = 12 * _HOUR_S
MAX_PROGRESS_FAILURES = 2  # for start and progress messages, which are soon outdated


def next_delay_s(
    num_failures: int,
    random: Random,
    *,
    retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    retry_after_s: float | None = None,
) -> float | None:
    """Seconds to wait after `num_failures` failures (at least 1); None: give up. A receiver may ask
    for a longer wait, up to MAX_RETRY_AFTER_S, but not for a shorter one."""
    if num_failures > len(retry_delays_s):
        return None
    delay_s = retry_delays_s[num_failures - 1] * (1 + JITTER * random.random())
    return max(delay_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After header (RFC 9110, 10.2.3: seconds or a date); None if invalid."""
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
