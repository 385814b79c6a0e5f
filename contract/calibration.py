"""How true the predicted waits were: |predicted − actual| ÷ actual, of the last thousand jobs of
each lane that a worker has taken. Written by the functions, read here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from contract.connection import broker_errors
from contract.errors import wire_errors
from contract.keys import Keys

# Waits under this count as this: a job that starts within a tick of "at once" is no error.
LEAST_WAIT_MS = 100


@dataclass(frozen=True, slots=True)
class Calibration:
    """Errors of one lane, as shares of the actual wait: half of all, nine in ten were smaller."""

    lane: str
    num_jobs: int
    p50: float | None
    p90: float | None


async def calibrations(
    client: redis.asyncio.Redis, keys: Keys, model: str, lanes: Sequence[str]
) -> list[Calibration]:
    """Of a model's lanes, in their order. Raises BrokerUnavailable, WireError."""
    return [_of(lane, await _waits(client, keys.of("calibration", model, lane))) for lane in lanes]


async def _waits(client: redis.asyncio.Redis, key: str) -> list[tuple[int, int]]:
    """(predicted, actual) in ms, the latest first."""
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
    """The least that so many are not above."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
