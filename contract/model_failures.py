"""Models that cannot stay up, as reported by the process that restarts their workers.

Why, since when and when the next try is are fields of the hash `pool:<model>`, which a worker that
becomes ready deletes (contract/starts.py). A model that was never served is put on the list of
models, so that gateways find its report.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import redis.asyncio

from contract.connection import broker_errors, now_ms, repeated
from contract.errors import wire_errors
from contract.keys import Keys

FIELDS = ("failed", "failed_at", "retry_at")  # of `pool:<model>`
MAX_REASON = 300  # characters
_KEPT_S = 1_800.0  # after the next try, whose start may take long


class ModelFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A report. `since_s`: Unix seconds of the Redis clock; `retry_in_s`: from the reading, 0 while
    the next try is under way."""

    reason: str
    since_s: float
    retry_in_s: float


class ModelFailures:
    """The reports of one partition. Every method raises BrokerUnavailable, CommandDenied."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def report(self, model: str, reason: str, *, retry_in_s: float) -> None:
        """Reports that the model's workers do not stay up, and when the next try is."""
        now = await now_ms(self._client)
        retry_ms = int(retry_in_s * 1000)
        key = self._keys.of("pool", model)
        with broker_errors(self._client, "HSET, PEXPIRE or SADD"):
            async with self._client.pipeline(transaction=True) as transaction:
                transaction.hset(key, "failed", reason[:MAX_REASON])
                transaction.hset(key, "retry_at", str(now + retry_ms))
                transaction.hsetnx(key, "failed_at", str(now))
                transaction.pexpire(key, retry_ms + int(_KEPT_S * 1000))
                transaction.sadd(self._keys.of("models"), model)
                await transaction.execute()

    async def forget(self, models: Iterable[str]) -> None:
        """Forgets reports: nobody tries these models any more, or they start anew."""
        with broker_errors(self._client, "HDEL"):
            for model in models:
                await self._client.hdel(self._keys.of("pool", model), *FIELDS)

    async def all(self) -> dict[str, ModelFailure]:
        """The reports by model. A model with several workers may have a live one all the same."""
        now = await now_ms(self._client)
        with wire_errors("list of models"), broker_errors(self._client, "SMEMBERS or HMGET"):
            raw: Any = await repeated(lambda: self._client.smembers(self._keys.of("models")))
            names = sorted(name.decode(errors="backslashreplace") for name in raw)
            async with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hmget(self._keys.of("pool", name), FIELDS)
                replies: Any = await pipeline.execute(raise_on_error=False)
        found = {}
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, list) and (failure := _failure(reply, now)) is not None:
                found[name] = failure
        return found


def _failure(values: list[bytes | None], now: int) -> ModelFailure | None:
    """Decodes a report; None if there is none, or it is not as this version writes it."""
    reason, since, retry = values
    if reason is None or since is None or retry is None:
        return None
    try:
        since_s, retry_in_s = int(since) / 1000, (int(retry) - now) / 1000
    except (ValueError, OverflowError):
        return None
    text = reason.decode(errors="replace")[:MAX_REASON]
    return ModelFailure(reason=text, since_s=since_s, retry_in_s=max(0.0, retry_in_s))
