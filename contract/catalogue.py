"""Models in Redis, which workers publish and gateways look up; and what Redis stores about the
object store."""

import logging
from typing import Any

import redis.asyncio

from contract.codec import decode_card, decode_tokenizer, encode, encode_tokenizer
from contract.connection import broker_errors, now_ms, repeated
from contract.errors import WireError
from contract.keys import Keys
from contract.library import Partition
from contract.model_cards import MAX_TOKENIZER_BYTES, ModelCard, TokenizerFiles
from contract.starts import Starts

log = logging.getLogger(__name__)

WORKER_TTL_S = 15.0  # a worker is live until this long after its last heartbeat
MAX_CARD_BYTES = 64 * 1024


class Catalogue(Partition):
    """The models of one partition. Every method raises BrokerUnavailable."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        super().__init__(client, keys)
        self.starts = Starts(client, keys)
        self._list = keys.of("models")
        self.unreadable: frozenset[str] = frozenset()  # models that `models` last left out
        self._has_list = True
        self._cards: dict[str, tuple[bytes, ModelCard]] = {}  # as they were last read

    async def publish(self, card: ModelCard, files: TokenizerFiles) -> None:
        """Publishes a model or replaces it. Raises WireError."""
        sha256, packed = encode_tokenizer(files)
        assert card.tokenizer_sha256 == sha256, "the card names another tokenizer"
        with broker_errors(self._client, "SET"):
            await self._client.set(self._keys.of("tokenizer", sha256), packed)
        await self.publish_card(card)

    async def publish_card(self, card: ModelCard) -> None:
        """Publishes a model whose tokenizer is published already. Raises WireError."""
        with broker_errors(self._client, "SET or SADD", record="list of models"):
            await self._client.set(self._keys.of("model", card.name), encode(card))
            await self._client.sadd(self._list, card.name)

    async def withdraw(self, name: str) -> None:
        """Takes a model off the list. Raises WireError."""
        with broker_errors(self._client, "SREM or DEL", record="list of models"):
            await self._client.srem(self._list, name)
            await self._client.delete(self._keys.of("model", name))

    async def models(self) -> list[ModelCard]:
        """All models ever published, by name. Omits models with unreadable cards and logs each
        when it becomes unreadable.
        """
        cards, unreadable = list[ModelCard](), set[str]()
        for raw_name in sorted(await self._names()):
            name = raw_name.decode(errors="backslashreplace")
            try:
                card = await self.model(name)
            except WireError as exc:
                unreadable.add(name)
                if name not in self.unreadable:
                    log.error("model left out: %s model=%.256r", exc, name)
            else:
                cards += [] if card is None else [card]
        self.unreadable = frozenset(unreadable)
        self._cards = {card.name: self._cards[card.name] for card in cards}
        return cards

    async def _names(self) -> set[bytes]:
        """The names of all models; empty if another program has overwritten the list."""
        try:
            with broker_errors(self._client, "SMEMBERS", record="list of models"):
                names: Any = await repeated(lambda: self._client.smembers(self._list))
        except WireError as exc:
            if self._has_list:
                log.error("%s", exc)
            self._has_list, names = False, ()
        else:
            self._has_list = True
        return set(names)

    async def model(self, name: str) -> ModelCard | None:
        """Returns a model's card, decoded once for as long as it stays the same; None if no such
        model was published. Raises WireError."""
        raw = await self._read(self._keys.of("model", name), MAX_CARD_BYTES)
        if not raw:
            return None
        read, card = self._cards.get(name, (b"", None))
        if card is None or read != raw:
            card = decode_card(raw)
            if card.name != name:
                raise WireError("its card is another model's")
            self._cards[name] = raw, card
        return card

    async def tokenizer(self, sha256: str) -> TokenizerFiles:
        """Returns a tokenizer. Raises WireError, also if it was never published."""
        packed = await self._read(self._keys.of("tokenizer", sha256), MAX_TOKENIZER_BYTES)
        if not packed:
            raise WireError(f"there is no tokenizer {sha256[:12]}")
        return decode_tokenizer(sha256, packed)

    async def num_live_workers(self, model: str) -> int:
        """Number of a model's workers with a recent heartbeat. Raises WireError."""
        since_ms = await now_ms(self._client) - int(WORKER_TTL_S * 1000)
        with broker_errors(self._client, "ZCOUNT", record="list of workers"):
            key = self._keys.of("workers", model)
            return await repeated(lambda: self._client.zcount(key, since_ms, "+inf"))

    async def _read(self, key: str, max_bytes: int) -> bytes:
        """A string in Redis, empty where there is none. Reads at most one byte over the limit.
        Raises WireError.
        """
        with broker_errors(self._client, "GETRANGE", record="card or tokenizer"):
            raw: Any = await repeated(lambda: self._client.getrange(key, 0, max_bytes))
        if len(raw) > max_bytes:
            raise WireError(f"it is longer than {max_bytes} bytes")
        return bytes(raw)


async def known_store(client: redis.asyncio.Redis, keys: Keys, own: str) -> str:
    """The name of the namespace's object store; '' for none. The first part that has a store
    leaves its name, `own`, in Redis.

    Raises BrokerUnavailable, CommandDenied, WireError.
    """
    with broker_errors(client, "HGET or HSETNX", record="object store's name"):
        raw: Any = await client.hget(keys.of("object_store"), "name")
        if raw is None and own:
            await client.hsetnx(keys.of("object_store"), "name", own)
            raw = await client.hget(keys.of("object_store"), "name")
    return own if raw is None else str(raw.decode(errors="replace"))


async def orphaned_jobs(client: redis.asyncio.Redis, keys: Keys, max_jobs: int) -> list[str]:
    """Ids of forgotten jobs whose objects are not deleted yet; `delete` and `sweep` list them.

    Raises BrokerUnavailable, WireError.
    """
    with broker_errors(client, "SRANDMEMBER", record="list of orphaned objects"):
        found: Any = await client.srandmember(keys.of("orphaned"), max_jobs)
    return [job_id.decode(errors="replace") for job_id in found or ()]


async def knows_key(
    client: redis.asyncio.Redis, keys: Keys, tenant: str, idempotency_key: str
) -> bool:
    """Whether a job was accepted under this Idempotency-Key. Raises BrokerUnavailable."""
    with broker_errors(client, "EXISTS"):
        return bool(await client.exists(keys.of("idem", tenant, idempotency_key)))


async def clear_orphan(client: redis.asyncio.Redis, keys: Keys, job_id: str) -> None:
    """Takes a job off the list once its objects are deleted. Raises BrokerUnavailable."""
    with broker_errors(client, "SREM"):
        await client.srem(keys.of("orphaned"), job_id)
