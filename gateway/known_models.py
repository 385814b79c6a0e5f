"""What workers have published of their models, remembered for a moment.

Every method raises BrokerUnavailable.
"""

import asyncio
import time
from collections import OrderedDict
from functools import partial

from contract.catalogue import Catalogue
from contract.functions import Functions
from contract.glance import Glance
from contract.jobs import ModelCard
from gateway.door import Door
from gateway.tokens import ModelTokenizer

CATALOGUE_TTL_S = 1.0
MAX_TOKENIZERS = 8


class KnownModels:
    """One for each gateway process."""

    def __init__(self, door: Door, catalogue: Catalogue, functions: Functions) -> None:
        self._door = door
        self._catalogue = catalogue
        self._functions = functions
        self._models: tuple[float, dict[str, ModelCard]] = (0.0, {})
        self._num_workers: dict[str, tuple[float, int]] = {}
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

    async def glances(self) -> dict[str, Glance]:
        """Every model as it stands now, by name."""
        return {
            name: await self._door.call(partial(self._functions.glance, name, card.lanes))
            for name, card in (await self.models()).items()
        }
