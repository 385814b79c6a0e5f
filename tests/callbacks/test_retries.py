"""When a failed delivery is tried again."""

from datetime import UTC, datetime
from random import Random

import pytest

from workers.callbacks.retries import (
    JITTER,
    MAX_RETRY_AFTER_S,
    RETRY_DELAYS_S,
    next_delay_s,
    parse_retry_after,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_each_delay_is_as_scheduled_plus_jitter() -> None:
    """5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 10 h, then no more."""
    rng = Random(1)
    delays = [next_delay_s(n, rng) for n in range(1, len(RETRY_DELAYS_S) + 1)]
    for delay, scheduled_s in zip(delays, RETRY_DELAYS_S, strict=True):
        assert delay is not None
        assert scheduled_s <= delay <= scheduled_s * (1 + JITTER)
    jitters = {(d or 0) / r for d, r in zip(delays, RETRY_DELAYS_S, strict=True)}
    assert len(jitters) == len(RETRY_DELAYS_S)
    assert next_delay_s(len(RETRY_DELAYS_S) + 1, rng) is None


def test_retry_after_may_lengthen_a_delay() -> None:
    """Within bounds. It cannot shorten a delay or add attempts."""
    rng = Random(1)
    assert next_delay_s(1, rng, retry_after_s=60) == 60
    assert (next_delay_s(2, rng, retry_after_s=1) or 0) >= RETRY_DELAYS_S[1]
    assert next_delay_s(1, rng, retry_after_s=1e9) == MAX_RETRY_AFTER_S
    assert next_delay_s(len(RETRY_DELAYS_S) + 1, rng, retry_after_s=5) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        ("0", 0),
        ("Thu, 01 Jan 2026 00:02:00 GMT", 120),
        ("Thu, 01 Jan 2020 00:02:00 GMT", 0),
        ("soon", None),
        ("-5", None),
        ("1e3", None),
        ("٣", None),
        ("9" * 20, None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    """Any other value is ignored."""
    assert parse_retry_after(value, NOW) == seconds
