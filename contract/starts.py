"""What processes that start workers announce of a model: when its next worker will be ready, how
many there should be, or why its workers do not stay up; and whether a worker is wanted.

All but the wish are fields of the hash `pool:<model>`. `submit` gives the time in its refusals
while no worker lives. Such a refusal leaves no job, so the gateway sets `wanted:<model>:<lane>` for
processes that start workers on demand. A model that failed before it was served is put on the list
of models, so that gateways find its report.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from contract.connection import broker_errors, now_ms, repeated
from contract.library import Partition

MAX_REASON = 300  # characters
ANY_LANE = ""  # of a wish: the lanes of a model that no worker has announced are not known
DECISION_TTL_S = 60.0  # who sizes a pool decides every few seconds
_OVERDUE_MS, _OVERDUE_RETRY_MS = 60_000, 1_000  # as in contract/lua/_pools.lua
_FAILURE = ("failed", "failed_at", "retry_at")  # of `pool:<model>`
_KEPT_S = 1_800.0  # after the next try, whose start may take long


class ModelFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A report. `since_s`: Unix seconds of the Redis clock; `retry_in_s`: from the reading, 0 while
    the next try is under way."""

    reason: str
    since_s: float
    retry_in_s: float


class ExpectedStart(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that starts. `since_s`: Unix seconds of the Redis clock."""

    since_s: float
    ready_in_s: float


class Starts(Partition):
    """The starts of workers in one partition. Every method raises BrokerUnavailable."""

    async def measured(self, model: str, took_s: float) -> None:
        """Reports how long a worker's start took, and thereby that the model has not failed."""
        with broker_errors(self._client, "HSET or HDEL", record="start of a worker"):
            await self._client.hset(self._key(model), "start_ms", str(int(took_s * 1000)))
            await self._client.hdel(self._key(model), *_FAILURE)

    async def announce(self, model: str, ready_in_s: float) -> None:
        """Announces that a worker of the model will be ready after `ready_in_s`."""
        ready_at_ms = await now_ms(self._client) + int(ready_in_s * 1000)
        with broker_errors(self._client, "HSET", record="start of a worker"):
            await self._client.hset(self._key(model), "ready_at", str(ready_at_ms))

    async def announce_another(self, model: str, starts_in_s: float) -> None:
        """Announces that a worker starts after `starts_in_s`. It is expected to take as long as the
        last one; announces nothing if that is unknown. Raises WireError."""
        with broker_errors(self._client, "HGET", record="start of a worker"):
            took: Any = await self._client.hget(self._key(model), "start_ms")
            took_s = None if took is None else int(took) / 1000
        if took_s is not None:
            await self.announce(model, starts_in_s + took_s)

    async def decide(self, model: str, num_workers: int) -> None:
        """Publishes how many workers the pool should have."""
        value = f"{num_workers} {await now_ms(self._client)}"
        with broker_errors(self._client, "HSET", record="start of a worker"):
            await self._client.hset(self._key(model), "num_wanted", value)

    async def num_wanted(self, model: str) -> int | None:
        """How many workers the pool should have; None where nobody has decided it lately. Raises
        WireError."""
        now = await now_ms(self._client)
        with broker_errors(self._client, "HGET", record="start of a worker"):
            raw: Any = await self._client.hget(self._key(model), "num_wanted")
            num, at_ms = map(int, (raw or b"0 0").split())
        return num if now - at_ms < DECISION_TTL_S * 1000 else None

    async def want(self, model: str, lane: str, for_s: float) -> None:
        """Records that a call was refused for want of a worker. It may come again in `for_s`."""
        with broker_errors(self._client, "SET"):
            await self._client.set(self._wish_key(model, lane), b"", px=int(for_s * 1000))

    async def is_wanted(self, model: str, lane: str) -> bool:
        with broker_errors(self._client, "EXISTS"):
            return bool(await self._client.exists(self._wish_key(model, lane)))

    async def report_failure(self, model: str, reason: str, *, retry_in_s: float) -> None:
        """Reports that the model's workers do not stay up, and when the next try is."""
        now = await now_ms(self._client)
        retry_ms = int(retry_in_s * 1000)
        key = self._key(model)
        with broker_errors(self._client, "HSET, PEXPIRE or SADD"):
            async with self._client.pipeline(transaction=True) as transaction:
                transaction.hset(key, "failed", reason[:MAX_REASON])
                transaction.hset(key, "retry_at", str(now + retry_ms))
                transaction.hsetnx(key, "failed_at", str(now))
                transaction.pexpire(key, retry_ms + int(_KEPT_S * 1000))
                transaction.sadd(self._keys.of("models"), model)
                await transaction.execute()

    async def forget_failures(self, models: Iterable[str]) -> None:
        """Forgets reports: nobody tries these models any more, or they start anew."""
        with broker_errors(self._client, "HDEL"):
            for model in models:
                await self._client.hdel(self._key(model), *_FAILURE)

    async def failures(self) -> dict[str, ModelFailure]:
        """The reports by model. A model with several workers may have a live one all the same."""
        now = await now_ms(self._client)
        with broker_errors(self._client, "SMEMBERS or HMGET", record="list of models"):
            raw: Any = await repeated(lambda: self._client.smembers(self._keys.of("models")))
            names = sorted(name.decode(errors="backslashreplace") for name in raw)
            async with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hmget(self._key(name), _FAILURE)
                replies: Any = await pipeline.execute(raise_on_error=False)
        found = {}
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, list) and (failure := _failure(reply, now)) is not None:
                found[name] = failure
        return found

    async def expected(self, model: str) -> ExpectedStart | None:
        """The model's next worker, as it was announced; None if none was, or none came. One that is
        overdue for less than a minute may be ready at any moment. Raises WireError."""
        now = await now_ms(self._client)
        with broker_errors(self._client, "HMGET", record="start of a worker"):
            raw: Any = await self._client.hmget(self._key(model), ["ready_at", "start_ms"])
            ready_ms, took_ms = (int(value or 0) for value in raw)
        if now > ready_ms + _OVERDUE_MS:
            return None
        left_ms = max(ready_ms - now, _OVERDUE_RETRY_MS)
        return ExpectedStart(since_s=(ready_ms - took_ms) / 1000, ready_in_s=left_ms / 1000)

    def _wish_key(self, model: str, lane: str) -> str:
        return self._keys.of("wanted", model, lane)

    def _key(self, model: str) -> str:
        return self._keys.of("pool", model)


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
