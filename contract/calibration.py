"""Errors of predicted waits: |predicted − actual| ÷ actual of a lane's last 1,000 claimed jobs.

The functions write the waits; this module reads them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from contract.connection import broker_errors
from contract.errors import wire_errors
from contract.keys import Keys

# Shorter waits count as this, so that a small delay is no large relative error.
LEAST_WAIT_MS = 100


@dataclass(frozen=True, slots=True)
class Calibration:
    """Median and 90th percentile of a lane's errors, relative to the actual wait."""

    lane: str
    num_jobs: int
    p50: float | None
    p90: float | None


async def calibrations(
    client: redis.asyncio.Redis, keys: Keys, model: str, lanes: Sequence[str]
) -> list[Calibration]:
    """The calibrations of a model's lanes, in order. Raises BrokerUnavailable, WireError."""
    return [_of(lane, await _waits(client, keys.of("calibration", model, lane))) for lane in lanes]


async def _waits(client: redis.asyncio.Redis, key: str) -> list[tuple[int, int]]:
    """(predicted, actual) in ms, latest first."""
    with wire_errors("calibration"), broker_errors(client, "LRANGE"):
        raw: Any = await client.lrange(key, 0, -1)
        pairs = [entry.split(b" ") for entry in raw]
        return [(int(predicted), int(actual)) for predicted, actual in pairs]


def _of(lane: str, waits: Sequence[tuple[int, int]]) -> Calibration:
    errors = sorted(
        abs(predicted - actual) / max(LEAST_WAIT_MS, actual) for predicted, actual in waits
    )
    return Calibration(lane, len(errors), _quantile(errors, 0.5), _quantile(errors, 0.9))


def _quantile(ascending: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
