"""Models and workers as Redis knows them: what workers publish and gateways look up.

A gateway needs nothing but Redis: card and tokenizer come from here, the tokenizer by its hash.
"""

from typing import Any

import msgspec
import redis.asyncio

from contract.codec import decode_card, decode_tokenizer, encode_card, encode_tokenizer
from contract.connection import broker_errors
from contract.jobs import ModelCard, TokenizerFiles
from contract.keys import Keys
from contract.redis_clock import now_ms

WORKER_TTL_S = 15.0  # a worker unheard of for so long does not count as live


class Catalogue(msgspec.Struct, frozen=True):
    """The models of one partition. Every method raises BrokerUnavailable."""

    client: redis.asyncio.Redis
    keys: Keys

    async def publish(self, card: ModelCard, files: TokenizerFiles) -> None:
        """Makes a model known, or replaces what was known of it."""
        sha256, packed = encode_tokenizer(files)
        assert card.tokenizer_sha256 == sha256, "the card names another tokenizer"
        with broker_errors():
            await self.client.set(self.keys.tokenizer(sha256), packed)
            await self.client.set(self.keys.model(card.name), encode_card(card))
            await self.client.sadd(self.keys.models, card.name)

    async def models(self) -> list[ModelCard]:
        """All models ever published, by name. Raises WireError."""
        with broker_errors():
            names: Any = await self.client.smembers(self.keys.models)
        cards = [await self.model(name.decode()) for name in sorted(names)]
        return [card for card in cards if card is not None]

    async def model(self, name: str) -> ModelCard | None:
        """Raises WireError."""
        with broker_errors():
            raw: Any = await self.client.get(self.keys.model(name))
        return None if raw is None else decode_card(raw)

    async def tokenizer(self, sha256: str) -> TokenizerFiles:
        """Raises WireError, KeyError where it was never published."""
        with broker_errors():
            packed: Any = await self.client.get(self.keys.tokenizer(sha256))
        if packed is None:
            raise KeyError(sha256)
        return decode_tokenizer(sha256, packed)

    async def num_live_workers(self, model: str) -> int:
        """Workers of a model that were heard of lately."""
        since_ms = await now_ms(self.client, self.keys) - int(WORKER_TTL_S * 1000)
        with broker_errors():
            return await self.client.zcount(self.keys.workers(model), since_ms, "+inf")
