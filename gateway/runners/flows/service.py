"""Serves the flows of `models.yaml` in a gateway: publishes them as models, runs their jobs, and
reads the file again when it has changed.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import msgspec
import redis.asyncio
from msgspec.structs import replace

from contract.catalogue import Catalogue
from contract.connection import connect
from contract.errors import BatchwayError
from contract.flows import Definition, Pipeline
from contract.function_types import Claimed
from contract.jobs import Job
from contract.keys import Keys
from contract.library import ensure_library
from contract.model_cards import ModelCard
from gateway.runners.flows.definitions import FlowError, check_flows, flow_card, load_flows, members
from gateway.runners.flows.run import FlowPublisher, Run
from gateway.runners.flows.stage_queues import StageQueues
from gateway.runners.flows.worker import FlowWorker
from gateway.state import Gateway

log = logging.getLogger("batchway.flows")

_LOOK_S = 1.0  # between two looks at the file and at the members' cards
_MAX_STAGE_QUEUES = 256
_LEAVE_S = 5.0  # at least, until nobody accepts jobs of a withdrawn flow: cards are cached for 1 s


class FlowService:
    """The flows of a gateway with a `models.yaml`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._broker = gateway.broker
        self._drain = gateway.drain
        self._path = Path(gateway.settings.models)
        keys = self._broker.shards.first.keys
        self._client = connect(gateway.settings.redis_url, keys)
        self._catalogue = Catalogue(self._client, keys)
        self._stamp: object = None
        self._definitions: Mapping[str, Definition] = {}
        self._published: dict[str, ModelCard] = {}
        self._workers: dict[tuple[str, int], FlowWorker] = {}  # by flow and partition
        self._clients: dict[int, redis.asyncio.Redis] = {0: self._client}
        self._leaving: dict[FlowWorker, float] = {}  # of withdrawn flows: since when
        self._stage_queues: dict[tuple[str, bytes], StageQueues] = {}
        self._last_line = ""
        self._has_library = False

    async def serve(self) -> None:
        """Serves flows until cancelled."""
        while True:
            if self._drain.has_begun:
                for worker in (*self._workers.values(), *self._leaving):
                    worker.drain()
            else:
                await self._look()
            await asyncio.sleep(_LOOK_S)

    async def aclose(self) -> None:
        """Gives the jobs that run back."""
        workers = *self._workers.values(), *self._leaving
        await asyncio.gather(*(worker.aclose() for worker in workers))
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def _look(self) -> None:
        try:
            if not self._has_library:
                await ensure_library(self._client)
                self._has_library = True
            try:
                await self._read()
            finally:  # also while the file is wrong: Redis may lose a card, and a worker may fail
                if self._stamp is not None:
                    await self._publish()
            await self._close_leaving()
        except FlowError as exc:
            state = "stays as it was" if self._published else "is not served yet"
            self._log_once(f"models.yaml {state}: {exc}")
        except BatchwayError as exc:
            self._log_once(f"flows wait: {exc}")
        except Exception as exc:  # the flows that are served must go on
            self._log_once(f"models.yaml not looked at: {type(exc).__name__}")
        else:
            self._last_line = ""

    def _log_once(self, line: str) -> None:
        """Logs a line, unless it was the last one."""
        if line != self._last_line:
            log.warning("%s", line)
        self._last_line = line

    async def _read(self) -> None:
        """Reads the file if it has changed. It replaces served flows only if all of it is right.
        Raises FlowError, BatchwayError."""
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp == self._stamp:
            return
        definitions = await asyncio.to_thread(load_flows, self._path)
        if self._published:
            check_flows(definitions, await self._cards(), self._path)
            log.info("models.yaml reloaded")
        self._stamp, self._definitions = stamp, definitions

    async def _cards(self) -> dict[str, ModelCard]:
        return {card.name: card for card in await self._catalogue.models()}

    async def _publish(self) -> None:
        """Publishes the flows once all members are published, and withdraws those that the file no
        longer contains. Raises FlowError, BatchwayError."""
        cards = await self._cards()
        await self._want_members(cards)
        flows = check_flows(self._definitions, cards, self._path)
        for name in _members_first(self._definitions):
            card = flow_card(name, flows[name], cards)
            if (known := self._published.get(name)) is not None:
                card = replace(card, created_s=known.created_s)
            is_stored = name in cards  # Redis may have lost its data
            cards[name] = card
            await self._serve(card)
            if card != known or not is_stored:
                await self._catalogue.publish_card(card)
                # At once, for the flows that call it: a list of models may be a second old.
                self._broker.known.add(card)
                log.info("flow served model=%s", name)
            self._published[name] = card
        await self._withdraw([name for name, card in cards.items() if card.flow is not None])

    async def _want_members(self, cards: Mapping[str, ModelCard]) -> None:
        """Asks for the first workers of declared members: no flow is served before all of them are
        published, so that no call of one could ask."""
        called = {model for each in self._definitions.values() for _, model in members(each)}
        for model in sorted(called & set(self._broker.known.declared) - cards.keys()):
            for shard in await self._broker.shards.all():
                await self._broker.request_worker(shard, model)

    async def _withdraw(self, flows: Sequence[str]) -> None:
        """Withdraws those of `flows` that are not in the file and that no other gateway runs.
        Workers of this gateway's flows finish their jobs."""
        own = self._published.keys() - self._definitions.keys()
        for name in own:
            del self._published[name]
            for key in [key for key in self._workers if key[0] == name]:
                self._leaving[self._workers.pop(key)] = self._broker.clock()
        for name in flows:
            if name in self._definitions:
                continue
            if name in own or await self._catalogue.num_live_workers(name) == 0:
                await self._catalogue.withdraw(name)
                log.info("flow withdrawn model=%s", name)

    async def _close_leaving(self) -> None:
        for worker, since_s in list(self._leaving.items()):
            if self._broker.clock() - since_s < _LEAVE_S:
                continue
            if worker.is_idle or worker.failure is not None:
                del self._leaving[worker]
                await worker.aclose()

    async def _serve(self, card: ModelCard) -> None:
        for shard in await self._broker.shards.all():
            await self._serve_in(card, shard.keys)

    async def _serve_in(self, card: ModelCard, keys: Keys) -> None:
        place = card.name, keys.partition
        known = self._workers.get(place)
        if known is not None and known.is_draining:  # the name was a model's for a while
            self._leaving[known] = self._broker.clock()
            known = None
        if known is not None:
            known.lanes = card.lanes
            if (failure := known.failure) is None:
                return
            log.error("flow begins again error=%s model=%s", type(failure).__name__, card.name)
            await known.aclose()
        if (client := self._clients.get(keys.partition)) is None:
            client = connect(self._gateway.settings.redis_url, keys)
            self._clients[keys.partition] = client
        worker = FlowWorker(client, keys, card.name, card.lanes, self._run)
        worker.start()
        self._workers[place] = worker

    def _run(self, publisher: FlowPublisher, claimed: Claimed) -> Run:
        return Run(self._gateway, publisher, claimed, self._stages_of(claimed.job))

    def _stages_of(self, job: Job) -> StageQueues | None:
        """The stages of a staged pipeline, shared by its jobs of one definition."""
        assert job.flow is not None
        definition = job.flow.flow.definition
        if not isinstance(definition, Pipeline) or definition.batching == "flat":
            return None
        key = job.model, hashlib.sha256(msgspec.json.encode(definition)).digest()
        if (known := self._stage_queues.get(key)) is None:
            worker = self._workers.get((job.model, 0))  # None: the flow is withdrawn
            lanes = worker.lanes if worker else ()
            known = StageQueues(len(definition.steps), self._broker.clock, lanes)
            self._stage_queues[key] = known
            while len(self._stage_queues) > _MAX_STAGE_QUEUES:
                del self._stage_queues[next(iter(self._stage_queues))]
        return known


def _members_first(definitions: Mapping[str, Definition]) -> list[str]:
    """Orders the flows' names so that a flow comes after those that it calls."""
    called = {
        name: [model for _, model in members(definition) if model in definitions]
        for name, definition in definitions.items()
    }
    return list(TopologicalSorter(called).static_order())


def _stamp(path: Path) -> object:
    """Returns a value that changes when the file does. Raises FlowError."""
    try:
        status = path.stat()
    except OSError as exc:
        raise FlowError(f"{path}: cannot be read: {exc.strerror}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino
