"""`batchway callbacks`: a relay for each partition, which makes an RQ job of each due message, and
RQ.

Any number of these processes may run; the outbox leases each message to one of them at a time.
"""

import asyncio
import contextlib
import logging
import random
import signal
import ssl
from concurrent.futures import ThreadPoolExecutor

from cachetools import LRUCache
from redis.exceptions import ResponseError

from contract.catalogue import Catalogue
from contract.connection import broker_errors, end_tasks
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.outbox import Outbox, Taken
from contract.payloads import open_store
from contract.shards import OpenShards, Shard
from contract.telemetry.tracing import Tracing
from contract.token_texts import TokenTexts
from workers.callbacks.deliverer import SERVICE, CallbackSettings, Deliverer
from workers.callbacks.destinations import AwsSender
from workers.callbacks.rq_runner import AttemptQueue, RqRunner, open_redis
from workers.callbacks.webhook import AddressGuard, WebhookSender

log = logging.getLogger("batchway.callbacks")

EXIT_DENIED = 3

MAX_TOKENIZERS = 4  # for log probabilities, which name tokens
_PAUSE_S = 1.0  # while Redis is unreachable
MAX_TAKEN = 16  # messages of one call, which Redis runs in a millisecond or two
_OWN_THREADS = 4  # of the relay, beside one of each attempt: for its name, its object or AWS


async def run_callbacks(settings: CallbackSettings, *, tls: ssl.SSLContext | None = None) -> int:
    """Runs until SIGTERM or SIGINT, then finishes running attempts. Returns the exit status."""
    for name in ("httpx", "httpcore"):  # they log URLs, which may contain secrets
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("rq", "rq.worker"):  # the second has its own level
        logging.getLogger(name).setLevel(logging.CRITICAL)  # rq_runner.py logs what ends it
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await CallbackService(settings, tls).run(stopping)
    except CommandDenied as exc:
        log.error("%s", exc)
        return EXIT_DENIED
    return 0


class CallbackService:
    """The relays of all partitions and one RQ worker."""

    def __init__(self, settings: CallbackSettings, tls: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        self._shards = OpenShards(settings.redis_url, settings.namespace)
        guard = AddressGuard(settings.allow)
        self._webhooks = WebhookSender(settings.allow, guard, timeout_s=settings.timeout_s, tls=tls)
        self._aws = AwsSender(timeout_s=settings.timeout_s)
        self._store = open_store(settings.object_store)
        self._tracing = Tracing(SERVICE)
        self._deliverers: dict[int, Deliverer] = {}  # by partition
        self._tokenizers: LRUCache[str, TokenTexts] = LRUCache(MAX_TOKENIZERS)
        self._rq_client = open_redis(settings.redis_url)
        self._attempts = AttemptQueue(self._rq_client, settings.namespace, settings.key)
        self._relays: list[asyncio.Task[None]] = []
        self._num_running = 0
        self._num_taking = 0  # places of messages that relays are asking for
        self._freed = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs until `stopping` is set. Raises CommandDenied."""
        self._tracing.open()
        loop = asyncio.get_running_loop()
        num_threads = self._settings.max_concurrent + _OWN_THREADS
        loop.set_default_executor(ThreadPoolExecutor(num_threads, thread_name_prefix="call"))

        def deliver(taken: Taken) -> None:
            asyncio.run_coroutine_threadsafe(self._attempt(taken), loop).result()

        def tell(change: int) -> None:
            loop.call_soon_threadsafe(self._count_running, change)

        runner = RqRunner(
            self._attempts,
            self._rq_client,
            deliver,
            tell,
            max_concurrent=self._settings.max_concurrent,
        )
        runner.start()
        log.info("callbacks are delivered namespace=%s", self._settings.namespace)
        relaying = asyncio.create_task(self._relay_all())
        stop_requested = asyncio.create_task(stopping.wait())
        await asyncio.wait([relaying, stop_requested], return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(relaying, stop_requested)  # first, as it begins the others
        await end_tasks(*self._relays)
        stopped = asyncio.create_task(asyncio.to_thread(runner.stop))
        done, _ = await asyncio.wait([stopped], timeout=self._settings.drain_s)
        if not done:
            log.warning("running attempts did not end in time; other processes repeat them")
        await self._webhooks.aclose()
        await self._shards.aclose()
        self._rq_client.close()
        await asyncio.to_thread(self._tracing.close)
        if not relaying.cancelled():
            relaying.result()  # raises the error that ended the relay

    def _count_running(self, change: int) -> None:
        self._num_running += change
        if change < 0:
            self._freed.set()

    async def _relay_all(self) -> None:
        """Starts a relay for each partition, until cancelled. Raises CommandDenied."""
        while True:
            with contextlib.suppress(BrokerUnavailable, WireError):
                for shard in (await self._shards.all())[len(self._relays) :]:
                    self._relays.append(asyncio.create_task(self._relay(shard.outbox)))
            await asyncio.sleep(_PAUSE_S)  # the namespace may not be made yet
            for relay in self._relays:
                if relay.done():
                    relay.result()

    async def _attempt(self, taken: Taken) -> None:
        """Makes an attempt, which may be of another process's relay. Raises BrokerUnavailable,
        CommandDenied."""
        shard = await self._shards.of(taken.job_id)
        if (deliverer := self._deliverers.get(shard.number)) is None:
            deliverer = self._deliverers[shard.number] = self._deliverer_of(shard)
        await deliverer.attempt(taken)

    def _deliverer_of(self, shard: Shard) -> Deliverer:
        return Deliverer(
            self._settings,
            shard.outbox,
            shard.functions,
            Catalogue(self._shards.first.client, self._shards.first.keys),
            self._webhooks,
            self._aws,
            self._store,
            random.Random(),
            self._tracing,
            self._tokenizers,
        )

    async def _relay(self, outbox: Outbox) -> None:
        """Makes RQ jobs of a partition's due messages until cancelled. Raises CommandDenied."""
        while True:
            self._freed.clear()
            try:
                with broker_errors(self._rq_client, "a command of RQ's queue"):
                    has_more = await self._relay_once(outbox)
            except (BrokerUnavailable, ResponseError, WireError) as exc:
                log.warning("no callbacks are delivered: %s", exc)
                await asyncio.sleep(_PAUSE_S)
                continue
            if not has_more:
                await asyncio.sleep(self._settings.poll_s)
            elif self._num_running:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.poll_s):
                        await self._freed.wait()

    async def _relay_once(self, outbox: Outbox) -> bool:
        """Returns whether more may be due."""
        num_waiting = await asyncio.to_thread(self._attempts.num_waiting)
        room = self._settings.max_concurrent - self._num_running - num_waiting - self._num_taking
        taken: list[Taken] | None = None
        while room > 0 and taken != []:
            num_asked = min(room, MAX_TAKEN)
            self._num_taking += num_asked
            try:
                taken = await outbox.take(
                    lease_s=self._settings.lease_s,
                    max_messages=num_asked,
                    max_per_target=self._settings.max_per_target,
                )
                if taken:
                    await asyncio.to_thread(self._attempts.put, taken)
            finally:
                self._num_taking -= num_asked
            room -= len(taken)
        return taken != []
