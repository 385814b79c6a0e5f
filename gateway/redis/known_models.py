"""Published models, and the memory of Redis, cached for a moment.

Each method raises BrokerUnavailable.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from cachetools import LRUCache, TTLCache

from contract.catalogue import Catalogue
from contract.errors import ErrorCode, JobRefused, WireError
from contract.function_types import FleetSnapshot, merged
from contract.library import max_memory
from contract.model_cards import ModelCard
from contract.partitions import MAX_PARTITIONS
from contract.starts import ExpectedStart, ModelFailure, Starts
from gateway.http.errors import ApiError, ModelUnreadable
from gateway.models.tokens import ModelTokenizer
from gateway.redis.shards import GatewayShard, GatewayShards

log = logging.getLogger("batchway.gateway")

CATALOGUE_TTL_S = 1.0
MEMORY_TTL_S = 60.0  # an operator may change it
MAX_TOKENIZERS = 8
MAX_COUNTS = 1024  # models whose number of workers is cached
REFUSED_S = 10.0  # a worker may publish the model again
_SOON_S = 1.0  # the next try of a failed model is under way


class WorkerWait(msgspec.Struct, frozen=True):
    """The wait for a worker. `expected_s`: until it is ready; None where none is announced."""

    expected_s: float | None


class NotAnnounced(ApiError):
    """No worker of a declared model has announced it yet, so its tokenizer is not known either.
    `expected_s`: until a worker is ready; None where unknown."""

    def __init__(self, model: str, expected_s: float | None) -> None:
        when = "" if expected_s is None else f": one should be ready in {math.ceil(expected_s)} s"
        super().__init__(
            503,
            ErrorCode.NO_WORKERS,
            f"the first worker of the model {model!r} is not ready yet{when}",
            headers={"x-dropped-reason": ErrorCode.NO_WORKERS},
            retry_after_s=expected_s,
        )


class KnownModels:
    """The models that one gateway process knows."""

    def __init__(self, shards: GatewayShards, declared: Sequence[str]) -> None:
        first = shards.first  # has the models; each partition has its own workers of them
        self.declared = declared  # somebody starts their workers, also the first
        self._shards = shards
        self._call = first.call
        self._client = first.client
        self._catalogue = Catalogue(first.client, first.keys)
        self._models: tuple[float, dict[str, ModelCard]] = (0.0, {})
        self._num_workers: TTLCache[tuple[int, str], int] = TTLCache(MAX_COUNTS, CATALOGUE_TTL_S)
        self._reports: TTLCache[int, dict[str, ModelFailure]] = TTLCache(
            MAX_PARTITIONS, CATALOGUE_TTL_S
        )
        self._max_memory: tuple[float, int] | None = None  # when it was read (s), bytes
        self._tokenizers: LRUCache[str, ModelTokenizer] = LRUCache(MAX_TOKENIZERS)
        # one at a time, because loading takes several times the tokenizer's size
        self._loading = asyncio.Lock()
        self._refused: dict[str, float] = {}  # hash of a tokenizer -> when to try it again
        self._spoiled: frozenset[str] = frozenset()  # models with unreadable state

    @property
    def num_unreadable(self) -> int:
        """Models with unreadable data in Redis, as far as this gateway has read them."""
        _, models = self._models
        refused = {name for name, card in models.items() if card.tokenizer_sha256 in self._refused}
        return len(self._catalogue.unreadable | refused | self._spoiled)

    async def aclose(self) -> None:
        """Ends the processes of templates."""
        for tokenizer in self._tokenizers.values():
            await tokenizer.aclose()

    async def models(self) -> dict[str, ModelCard]:
        """Returns the published models by name, at most a second old; if there are none, Redis is
        asked each time. Omits models with unreadable cards."""
        now_s = time.monotonic()
        asked_s, models = self._models
        if not models or now_s - asked_s > CATALOGUE_TTL_S:
            known = self._models
            models = {card.name: card for card in await self._call(self._catalogue.models)}
            if self._models is not known:  # this list may lack what was added meanwhile
                return await self.models()
            self._models = (now_s, models)
        return models

    async def named(self, name: str) -> str:
        """The published name of a model: its own, or one on the Hub, if that is one model's."""
        models = await self.models()
        found = [card.name for card in models.values() if name and name in card.hub_names]
        return found[0] if name not in {*models, *self.declared} and len(found) == 1 else name

    def add(self, card: ModelCard) -> None:
        """Adds a model that this process publishes, so that it is known at once."""
        asked_s, models = self._models
        self._models = asked_s, {**models, card.name: card}

    async def tokenizer(self, card: ModelCard) -> ModelTokenizer:
        """A model's tokenizer, cached by its hash. Raises ModelUnreadable."""
        sha256 = card.tokenizer_sha256
        tokenizer = self._tokenizers.get(sha256)
        if tokenizer is None:
            async with self._loading:
                tokenizer = self._tokenizers.get(sha256)
                if tokenizer is None:
                    tokenizer = await self._load(card)
                    if len(self._tokenizers) == MAX_TOKENIZERS:
                        _, evicted = self._tokenizers.popitem()
                        await evicted.aclose()
                    self._tokenizers[sha256] = tokenizer
        return tokenizer

    async def _load(self, card: ModelCard) -> ModelTokenizer:
        """Loads a tokenizer. After a failure it waits before the next try, because callers could
        otherwise keep a gateway busy."""
        sha256, now_s = card.tokenizer_sha256, time.monotonic()
        if now_s < self._refused.get(sha256, 0.0):
            raise ModelUnreadable(card.name)
        try:
            files = await self._call(self._catalogue.tokenizer, sha256)
            tokenizer = await asyncio.to_thread(ModelTokenizer, card.name, files)
        except (WireError, ValueError) as exc:
            if sha256 not in self._refused:
                log.error("tokenizer refused: %s model=%s", exc, card.name)
            known = {card.tokenizer_sha256 for card in self._models[1].values()}
            self._refused = {key: at_s for key, at_s in self._refused.items() if key in known}
            self._refused[sha256] = now_s + REFUSED_S
            raise ModelUnreadable(card.name) from exc
        self._refused.pop(sha256, None)
        return tokenizer

    async def num_live_workers(self, model: str) -> int:
        """The number of live workers of a model. A positive number may be a second old."""
        return sum([await self.num_live_in(shard, model) for shard in await self._shards.all()])

    async def num_live_in(self, shard: GatewayShard, model: str) -> int:
        """The same of one partition."""
        if (known := self._num_workers.get((shard.number, model))) is not None:
            return known
        catalogue = Catalogue(shard.client, shard.keys)
        try:
            num_workers = await shard.call(catalogue.num_live_workers, model)
        except WireError:  # `snapshots` reports it
            return 0
        if num_workers:
            self._num_workers[shard.number, model] = num_workers
        return num_workers

    async def failures(self) -> dict[str, ModelFailure]:
        """Returns the models without a live worker that cannot stay up, at most a second old. Some
        were never published."""
        found = dict[str, ModelFailure]()
        for shard in await self._shards.all():
            for model, failure in (await self._reported(shard)).items():
                if not await self.num_live_workers(model):
                    found[model] = failure
        return found

    async def failure_in(self, shard: GatewayShard, model: str) -> ModelFailure | None:
        """Why the model cannot stay up in a partition; None if it can, or a worker lives there."""
        failure = (await self._reported(shard)).get(model)
        return failure if failure and not await self.num_live_in(shard, model) else None

    async def _reported(self, shard: GatewayShard) -> dict[str, ModelFailure]:
        """The reports of a partition, at most a second old."""
        if (known := self._reports.get(shard.number)) is not None:
            return known
        reports = await shard.call(Starts(shard.client, shard.keys).failures)
        self._reports[shard.number] = reports
        return reports

    async def expected_start(self, model: str) -> ExpectedStart | None:
        """The model's next worker, in any partition, if one was announced."""
        found = [await self.expected_in(shard, model) for shard in await self._shards.all()]
        return min((each for each in found if each), key=lambda s: s.ready_in_s, default=None)

    async def expected_in(self, shard: GatewayShard, model: str) -> ExpectedStart | None:
        """The same of one partition."""
        with suppress(WireError):
            return await shard.call(Starts(shard.client, shard.keys).expected, model)
        return None

    async def worker_wait(self, model: str, shard: GatewayShard) -> WorkerWait | None:
        """What a waiting job of the model waits for beside its turn; None if a worker lives in its
        partition."""
        if await self.num_live_in(shard, model):
            return None
        start = await self.expected_in(shard, model)
        return WorkerWait(None if start is None else start.ready_in_s)

    async def num_wanted(self) -> dict[str, int]:
        """How many workers there should be by model, where somebody decides that."""
        found = Counter[str]()
        for model in sorted({*await self.models(), *self.declared}):
            for shard in await self._shards.all():
                starts = Starts(shard.client, shard.keys)
                with suppress(WireError):
                    num = await shard.call(starts.num_wanted, model)
                    if num is not None:
                        found[model] += num
        return found

    async def explained(self, model: str, shard: GatewayShard, refused: JobRefused) -> JobRefused:
        """The refusal; for want of a worker it says why, as far as that is known, and where."""
        if refused.code is not ErrorCode.NO_WORKERS:
            return refused
        if (failure := await self.failure_in(shard, model)) is not None:
            return model_failed(model, failure)
        if (num := len(await self._shards.all())) == 1:
            return refused
        message = f"{refused.message} in partition {shard.number} of {num}, which is this tenant's"
        return JobRefused(
            refused.code, message, retry_after_s=refused.retry_after_s, rates=refused.rates
        )

    async def max_memory_bytes(self) -> int:
        """The bytes that Redis may use, at most a minute old; 0: unknown."""
        now_s = time.monotonic()
        if self._max_memory is None or now_s - self._max_memory[0] > MEMORY_TTL_S:
            num_bytes, is_limited = await self._call(max_memory, self._client)
            if self._max_memory is None and not is_limited:
                log.warning("Redis has no maxmemory: it may fill its machine's memory; set one")
            self._max_memory = now_s, num_bytes
        return self._max_memory[1]

    async def snapshots(self) -> dict[str, FleetSnapshot]:
        """Returns snapshots of all models by name; omits models with unreadable data."""
        found, spoiled = {}, set()
        for name, card in (await self.models()).items():
            try:
                found[name] = await self._snapshot(name, card.lanes)
            except WireError as exc:
                spoiled.add(name)
                if name not in self._spoiled:
                    log.error("model left out of the metrics: %s model=%s", exc, name)
        self._spoiled = frozenset(spoiled)
        return found

    async def _snapshot(self, model: str, lanes: Sequence[str]) -> FleetSnapshot:
        return merged(await self._shards.each(lambda shard: shard.functions.snapshot(model, lanes)))


def model_failed(name: str, failure: ModelFailure) -> JobRefused:
    """The refusal of a call of a model that cannot stay up."""
    planned = f"in {failure.retry_in_s:.0f} s" if failure.retry_in_s else "under way"
    message = f"the model {name!r} has failed: {failure.reason} (the next try is {planned})"
    retry_s = max(_SOON_S, failure.retry_in_s)
    return JobRefused(ErrorCode.MODEL_FAILED, message, retry_after_s=retry_s)
