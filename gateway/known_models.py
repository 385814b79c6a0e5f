"""What workers have published of their models, and how much Redis holds, remembered for a moment.

Every method raises BrokerUnavailable.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from functools import partial

from contract.catalogue import Catalogue
from contract.functions import Functions
from contract.glance import Glance
from contract.jobs import ModelCard
from gateway.door import Door
from gateway.tokens import ModelTokenizer

log = logging.getLogger("batchway.gateway")

CATALOGUE_TTL_S = 1.0
MEMORY_TTL_S = 60.0  # an operator may give Redis more, or less
MAX_TOKENIZERS = 8


class KnownModels:
    """One for each gateway process."""

    def __init__(self, door: Door, catalogue: Catalogue, functions: Functions) -> None:
        self._door = door
        self._catalogue = catalogue
        self._functions = functions
        self._models: tuple[float, dict[str, ModelCard]] = (0.0, {})
        self._num_workers: dict[str, tuple[float, int]] = {}
        self._max_memory: tuple[float, int] | None = None  # when it was asked (s), bytes
        self._tokenizers: OrderedDict[str, ModelTokenizer] = OrderedDict()

    async def models(self) -> dict[str, ModelCard]:
        """The published models by name, at most a second old; that there is none is asked again.

        Raises WireError.
        """
        now_s = time.monotonic()
        asked_s, models = self._models
        if not models or now_s - asked_s > CATALOGUE_TTL_S:
            models = {card.name: card for card in await self._door.call(self._catalogue.models)}
            self._models = (now_s, models)
        return models

    async def tokenizer(self, card: ModelCard) -> ModelTokenizer:
        """A model's tokenizer; kept by its hash. Raises WireError, KeyError."""
        sha256 = card.tokenizer_sha256
        if sha256 not in self._tokenizers:
            files = await self._door.call(lambda: self._catalogue.tokenizer(sha256))
            self._tokenizers[sha256] = await asyncio.to_thread(ModelTokenizer, files)
        self._tokenizers.move_to_end(sha256)
        while len(self._tokenizers) > MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)
        return self._tokenizers[sha256]

    async def num_live_workers(self, model: str) -> int:
        """Live workers of a model; a figure above 0 may be a second old."""
        now_s = time.monotonic()
        asked_s, num_workers = self._num_workers.get(model, (0.0, 0))
        if not num_workers or now_s - asked_s > CATALOGUE_TTL_S:
            num_workers = await self._door.call(lambda: self._catalogue.num_live_workers(model))
            self._num_workers[model] = (now_s, num_workers)
        return num_workers

    async def max_memory_bytes(self) -> int:
        """What Redis may use, as it was a minute ago at most; 0: unknown."""
        now_s = time.monotonic()
        if self._max_memory is None or now_s - self._max_memory[0] > MEMORY_TTL_S:
            num_bytes, is_limited = await self._door.max_memory()
            if self._max_memory is None and not is_limited:
                log.warning("Redis has no maxmemory: it may fill its machine's memory; set one")
            self._max_memory = now_s, num_bytes
        return self._max_memory[1]

    async def glances(self) -> dict[str, Glance]:
        """Every model as it stands now, by name."""
        return {
            name: await self._door.call(partial(self._functions.glance, name, card.lanes))
            for name, card in (await self.models()).items()
        }
