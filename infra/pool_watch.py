"""Reads the pool's state from Redis: backlog, workers, their fill and speed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from contract.catalogue import WORKER_TTL_S
from contract.connection import broker_errors, now_ms
from contract.keys import Keys
from contract.starts import Starts


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that takes jobs; `load` is the used share of its KV cache."""

    incarnation: str
    num_jobs: int
    load: float


@dataclass(frozen=True, slots=True)
class PoolState:
    """One observation. `tokens_per_s` is per worker, None until measured; `incarnations` are all
    live workers, including draining ones; `is_wanted`: calls were refused for want of one."""

    queued_tokens: dict[str, int]
    workers: tuple[ReadyWorker, ...]
    tokens_per_s: float | None
    incarnations: tuple[str, ...]
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class PoolWatch:
    """Reads the pool's state. Every method raises BrokerUnavailable."""

    client: redis.asyncio.Redis
    keys: Keys
    model: str
    lanes: Sequence[str]

    async def look(self) -> PoolState:
        since_ms = await now_ms(self.client) - int(WORKER_TTL_S * 1000)
        with broker_errors(self.client, "HGET or ZRANGEBYSCORE"):
            queued = {}
            for lane in self.lanes:
                key = self.keys.of("counters", self.model, lane)
                tokens: Any = await self.client.hget(key, "queued_tokens")
                queued[lane] = max(0, int(tokens or 0))
            names: Any = await self.client.zrangebyscore(
                self.keys.of("workers", self.model), since_ms, "+inf"
            )
            incarnations = tuple(name.decode() for name in names)
            seen = [await self._worker(name) for name in incarnations]
            rate: Any = await self.client.hget(self.keys.of("pool", self.model), "tokens_per_s")
        starts = Starts(self.client, self.keys)
        wishes = [await starts.is_wanted(self.model, lane) for lane in self.lanes]
        workers = tuple(worker for worker in seen if worker is not None)
        return PoolState(queued, workers, float(rate or 0) or None, incarnations, any(wishes))

    async def _worker(self, incarnation: str) -> ReadyWorker | None:
        raw: Any = await self.client.hgetall(self.keys.of("worker", incarnation))
        if not raw or raw.get(b"state") == b"draining":
            return None
        info = json.loads(raw.get(b"info") or b"{}")
        num_blocks = info.get("num_blocks") or 0
        used = num_blocks - info.get("num_free_blocks", num_blocks)
        num_jobs: Any = await self.client.scard(self.keys.of("own", incarnation))
        return ReadyWorker(incarnation, int(num_jobs), used / num_blocks if num_blocks else 0.0)
