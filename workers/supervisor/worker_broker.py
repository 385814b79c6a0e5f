"""A worker's calls of Redis: claims, appends, heartbeats, releases, subscriptions.

A worker is a worker of every partition, under one incarnation. Each call goes to the partition that
its job's id names; a partition that does not answer stops no other one. Partition 0 has what is not
a tenant's: the model's card, the metrics, the order to drain.

Over 300 lines: each call in one partition, and the same over all of them.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import redis.asyncio
from msgspec.structs import replace

from contract.catalogue import Catalogue, clear_orphan, orphaned_jobs
from contract.codec import encode_tokenizer
from contract.connection import connect, end_tasks
from contract.consumer import listen
from contract.errors import BatchwayError, BrokerFull, BrokerUnavailable
from contract.events import LogEntry
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    LaneRoom,
    Release,
    Verdict,
    WorkerCapacity,
    WorkerState,
)
from contract.ids import partition_of
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import check_fitness, ensure_library
from contract.model_cards import ModelCard, TokenizerFiles
from contract.partitions import Homes, lower_rests
from contract.payloads.store import ObjectStore
from contract.roster import Roster
from contract.starts import Starts
from workers.ipc.messages import Ready
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

_READ_EVENTS = 500
_ORPHANED_JOBS = 20  # per call
_SCORING_LANE = "scoring"  # the default of prefill-only models
_OWN_FORMAT = "template"  # the name of a format that only the model's chat template shows
_RENEWAL_INTERVAL = 0.05  # of a lease: appends renew leases at most this often
_MAP_S, _SINGLE_MAP_S = 1.0, 5.0  # between two looks at the map; while there is none

T = TypeVar("T")
Item = TypeVar("Item", Append, Release, Blame)
Verdicts = list[tuple[Verdict | JobStatus, int]]
_Report = tuple[str, WorkerState, WorkerCapacity]  # of a heartbeat


class WorkerBroker:
    """The Redis calls of one worker incarnation in one partition. Each raises
    BrokerUnavailable."""

    def __init__(
        self,
        settings: WorkerSettings,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        client: redis.asyncio.Redis | None = None,
        partition: int = 0,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.incarnation = incarnation
        self.partition = partition
        self._keys = Keys(settings.namespace, partition)
        self._client = client or connect(settings.redis_url, self._keys)
        self._functions = Roster(self._client, self._keys)
        self.homes = Homes(self._client, self._keys)
        self.last_contact_s = clock()  # when the last call that renewed the leases was sent
        self._appends_renewed_s = -math.inf  # when an append last renewed

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ensure_library(self) -> None:
        await check_fitness(self._client)
        await ensure_library(self._client)

    async def publish_model(self, card: ModelCard, tokenizer: TokenizerFiles) -> None:
        """Publishes the model card and tokenizer, so that gateways accept jobs for the model."""
        await Catalogue(self._client, self._keys).publish(card, tokenizer)

    async def claim(
        self,
        *,
        lanes: Mapping[str, float],
        rooms: Mapping[str, LaneRoom],
        free_tokens: int = 0,
        is_idle: bool,
        only_offers: bool = False,
        config_version: str,
    ) -> list[Claimed]:
        """Claims from these lanes (name to minimum share) as far as there is room, then what other
        workers offer, if it has up to `free_tokens`. `is_idle`: the worker holds no job."""
        arm = "" if self._settings.candidate_path is None else " candidate"
        sent_s = self._clock()
        claimed = await self._functions.claim(
            self.incarnation,
            self._settings.served_model_name,
            list(lanes),
            min_shares=lanes,
            lease_s=self._settings.lease_s,
            max_jobs=0,
            max_tokens=free_tokens,
            rooms=rooms,
            is_idle=is_idle,
            only_offers=only_offers,
            config_version=config_version + arm,
        )
        if is_idle:
            self._note_renewal(sent_s)
        return claimed

    async def mine(self, known_ids: Sequence[str]) -> list[Claimed]:
        """The jobs of a claim whose reply was lost. `known_ids`: the jobs that the worker holds."""
        sent_s = self._clock()
        found = await self._functions.mine(
            self.incarnation, known_ids, lease_s=self._settings.lease_s
        )
        if not known_ids:
            self._note_renewal(sent_s)
        return found

    async def waiting(self, lanes: Sequence[str]) -> tuple[int, dict[str, float]]:
        """What waits here for this worker (`waiting` of contract/functions.py)."""
        model = self._settings.served_model_name
        return await self._functions.waiting(model, self.incarnation, lanes)

    async def read_log(self, job_id: str, tenant: str) -> list[LogEntry]:
        """A job's whole log; empty if the job is gone."""
        entries: list[LogEntry] = []
        while True:
            after = entries[-1].number if entries else 0
            found = await self._functions.read(job_id, tenant, after=after, max_events=_READ_EVENTS)
            if found is None:
                return []
            view, page = found
            entries += page
            if view.ends_with(page):
                return entries

    async def append(self, items: Sequence[Append]) -> Verdicts:
        """Appends events to logs; also renews the jobs' leases unless an append did so recently."""
        sent_s, lease_s = self._clock(), self._settings.lease_s
        renews = sent_s - self._appends_renewed_s >= _RENEWAL_INTERVAL * lease_s
        with self._holding_on(sent_s):
            verdicts = await self._functions.append(
                self.incarnation, items, lease_s=lease_s if renews else 0.0
            )
        if renews:
            self._appends_renewed_s = sent_s
            self._note_renewal(sent_s)
        return verdicts

    async def heartbeat(
        self,
        held: Sequence[tuple[str, int]],
        info: str,
        state: WorkerState,
        capacity: WorkerCapacity,
        counted: Mapping[str, int],
    ) -> list[str]:
        """Renews the leases of the held jobs. Returns the ids of jobs that this worker has lost."""
        sent_s = self._clock()
        with self._holding_on(sent_s):
            lost = await self._functions.heartbeat(
                self.incarnation,
                self._settings.served_model_name,
                held,
                lease_s=self._settings.lease_s,
                info=info,
                state=state,
                capacity=capacity,
                counted=counted,
            )
        self._note_renewal(sent_s)
        return lost

    @contextlib.contextmanager
    def _holding_on(self, sent_s: float) -> Iterator[None]:
        """Keeps the jobs if Redis refuses all writes because its disk is full: nobody can take them
        then. If one is taken all the same, its next append is fenced."""
        try:
            yield
        except BrokerFull:
            self.last_contact_s = max(self.last_contact_s, sent_s)
            raise

    def _note_renewal(self, sent_s: float) -> None:
        """Records that a call sent at `sent_s` renewed the leases. A claim renews only the leases
        that it grants, so it counts only if no other job is held. If it never counted, a worker
        whose engine takes longer to load than a lease lasts would drop its first jobs: it sends no
        heartbeats yet."""
        self.last_contact_s = max(self.last_contact_s, sent_s)

    async def report_start(self, took_s: float) -> None:
        """Reports how long this worker's start took."""
        await Starts(self._client, self._keys).measured(self._settings.served_model_name, took_s)

    async def announce_start(self, ready_in_s: float) -> None:
        """Tells when this worker's engine is expected to be ready again."""
        await Starts(self._client, self._keys).announce(
            self._settings.served_model_name, ready_in_s
        )

    async def is_to_drain(self) -> bool:
        """Whether this worker was ordered to drain."""
        return await self._functions.is_to_drain(self.incarnation)

    async def listen(self, wake: asyncio.Event, control: "asyncio.Queue[str]") -> None:
        """Listens until cancelled, as contract/consumer.py says."""
        model = self._settings.served_model_name
        await listen(self._client, self._keys, model, self.incarnation, wake, control)

    async def leave(self, counted: Mapping[str, int]) -> None:
        """Reports that this worker ends, with its final counts."""
        model = self._settings.served_model_name
        await self._functions.leave(self.incarnation, model, counted)

    async def release(self, items: Sequence[Release]) -> Verdicts:
        return await self._functions.release(self.incarnation, items)

    async def blame(self, items: Sequence[Blame]) -> Verdicts:
        return await self._functions.blame(
            self.incarnation, items, max_crashes=self._settings.max_crashes
        )

    async def delete_orphaned_objects(self, store: ObjectStore) -> None:
        """Deletes objects of forgotten jobs. Raises PayloadUnavailable."""
        for job_id in await orphaned_jobs(self._client, self._keys, _ORPHANED_JOBS):
            await asyncio.to_thread(store.delete_job, job_id)
            await clear_orphan(self._client, self._keys, job_id)

    async def sweep(self) -> None:
        swept = await self._functions.sweep()
        if swept.num_lapsed or swept.num_expired or swept.num_unattended:
            log.info(
                "sweep leases_lapsed=%d jobs_expired=%d jobs_unattended=%d",
                swept.num_lapsed,
                swept.num_expired,
                swept.num_unattended,
            )


class AllPartitions(WorkerBroker):
    """The broker of partition 0, and through it those of the others. `on_wake` is told in which
    partition a job waits; `share_of` tells which part of the worker a partition may count on."""

    def __init__(
        self,
        settings: WorkerSettings,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        client: redis.asyncio.Redis | None = None,
    ) -> None:
        super().__init__(settings, incarnation, clock, client)
        self._others: dict[int, WorkerBroker] = {}
        self._changed = asyncio.Event()  # the partitions have
        self._read_s = -math.inf
        self._report: _Report | None = None
        self.on_wake: Callable[[int], None] = lambda _: None
        self.share_of: Callable[[int], float] = lambda _: 1.0

    def parts(self) -> list[WorkerBroker]:
        """The brokers of all partitions, each of which makes the calls of one."""
        return [self, *self._others.values()] if self._others else [self]

    def part(self, number: int) -> WorkerBroker:
        """The broker of a partition, whether the map has it yet or not."""
        if number == self.partition:
            return self
        if (found := self._others.get(number)) is None:
            found = WorkerBroker(self._settings, self.incarnation, self._clock, partition=number)
            self._others[number] = found
            self._changed.set()
        return found

    async def aclose(self) -> None:
        await asyncio.gather(*(part.aclose() for part in self._others.values()))
        await super().aclose()

    # --- the map

    async def refresh(self) -> None:
        """Reads the map, and begins to serve new partitions. Raises BrokerUnavailable."""
        now_s = self._clock()
        if now_s - self._read_s < (_MAP_S if self._others else _SINGLE_MAP_S):
            return
        known = await self.homes.map()
        self._read_s = now_s
        for number in known.entries.keys() - self._others.keys() - {0}:
            part = self.part(number)
            log.info("partition served number=%d", number)
            if self._report is not None:
                await self._beat(part, [], self._report, {})
        for number in self._others.keys() - known.entries.keys():
            gone = self._others.pop(number)
            self._changed.set()
            await gone.aclose()

    # --- calls about jobs

    async def read_log(self, job_id: str, tenant: str) -> list[LogEntry]:
        return await WorkerBroker.read_log(self.part(partition_of(job_id)), job_id, tenant)

    async def append(self, items: Sequence[Append]) -> Verdicts:
        return await self._spread(items, WorkerBroker.append)

    async def release(self, items: Sequence[Release]) -> Verdicts:
        return await self._spread(items, WorkerBroker.release)

    async def blame(self, items: Sequence[Blame]) -> Verdicts:
        return await self._spread(items, WorkerBroker.blame)

    async def _spread(
        self,
        items: Sequence[Item],
        call: Callable[[WorkerBroker, Sequence[Item]], Awaitable[Verdicts]],
    ) -> Verdicts:
        """One call for each partition that has jobs in it. Raises BrokerUnavailable if one does not
        answer, after the others did: the calls may be repeated."""
        if not self._others:
            return await call(self, items)
        groups = dict[int, list[int]]()
        for place, item in enumerate(items):
            groups.setdefault(partition_of(item.job_id), []).append(place)

        async def ask(number: int, places: list[int]) -> Verdicts:
            return await call(self.part(number), [items[place] for place in places])

        replies = await _all(ask(number, places) for number, places in groups.items())
        found = dict[int, tuple[Verdict | JobStatus, int]]()
        for places, reply in zip(groups.values(), replies, strict=True):
            found |= dict(zip(places, reply, strict=True))
        return [found[place] for place in range(len(items))]

    # --- calls about the worker

    async def heartbeat(
        self,
        held: Sequence[tuple[str, int]],
        info: str,
        state: WorkerState,
        capacity: WorkerCapacity,
        counted: Mapping[str, int],
    ) -> list[str]:
        report = self._report = info, state, capacity
        if not self._others:
            return await self._beat(self, held, report, counted)
        parts = list(self._others.values())
        own, *others = await asyncio.gather(
            self._beat(self, held, report, counted),
            *(self._beat(part, held, report, {}) for part in parts),
            return_exceptions=True,
        )
        lost = list[str]()
        for part, reply in zip(parts, others, strict=True):
            if isinstance(reply, BatchwayError):
                log.warning("heartbeat failed partition=%d: %s", part.partition, reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                lost += reply
        if isinstance(own, BaseException):
            raise own
        return lost + own

    async def _beat(
        self,
        part: WorkerBroker,
        held: Sequence[tuple[str, int]],
        report: _Report,
        counted: Mapping[str, int],
    ) -> list[str]:
        info, state, capacity = report
        own = [pair for pair in held if partition_of(pair[0]) == part.partition]
        if self._others:
            capacity = self._capacity(part.partition, capacity, len(held) - len(own))
        return await WorkerBroker.heartbeat(part, own, info, state, capacity, counted)

    def _capacity(self, number: int, whole: WorkerCapacity, num_other: int) -> WorkerCapacity:
        """What jobs of a partition may count on: its part of the rate, and the places that jobs of
        others do not take."""
        places = max(1, whole.max_jobs - num_other) if whole.max_jobs else 0
        tokens = whole.max_tokens * places // whole.max_jobs if whole.max_jobs else 0
        rate = round(whole.tokens_per_s * self.share_of(number), 3)
        return replace(whole, tokens_per_s=rate, max_jobs=places, max_tokens=tokens)

    async def report_start(self, took_s: float) -> None:
        await super().report_start(took_s)
        await self._tell_others(lambda part: part.report_start(took_s))

    async def announce_start(self, ready_in_s: float) -> None:
        await super().announce_start(ready_in_s)
        await self._tell_others(lambda part: part.announce_start(ready_in_s))

    async def _tell_others(self, tell: Callable[[WorkerBroker], Awaitable[None]]) -> None:
        for part in list(self._others.values()):
            try:
                await tell(part)
            except BatchwayError as exc:
                log.warning("not told partition=%d: %s", part.partition, exc)

    async def delete_orphaned_objects(self, store: ObjectStore) -> None:
        await super().delete_orphaned_objects(store)
        await _all(part.delete_orphaned_objects(store) for part in self._others.values())

    async def sweep(self) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self.refresh()
        others = list(self._others.values())
        await _all((super().sweep(), *(part.sweep() for part in others)))
        if others:
            await _all(lower_rests(self._ask, part.partition) for part in self.parts())

    async def _ask(self, number: int, call: Callable[[Homes], Awaitable[T]], /) -> T:
        return await call(self.part(number).homes)

    async def listen(self, wake: asyncio.Event, control: "asyncio.Queue[str]") -> None:
        tasks = dict[int, asyncio.Task[None]]()
        try:
            while True:
                self._changed.clear()
                numbers = {part.partition for part in self.parts()}
                for number in numbers - tasks.keys():
                    heard = _Wake(wake, lambda number=number: self.on_wake(number))  # type: ignore[misc]
                    listening = WorkerBroker.listen(self.part(number), heard, control)
                    tasks[number] = asyncio.create_task(listening)
                await end_tasks(*(tasks.pop(number) for number in tasks.keys() - numbers))
                await self._changed.wait()
        finally:
            await end_tasks(*tasks.values())


class _Wake(asyncio.Event):
    """Passes on that jobs wait, after `note`."""

    def __init__(self, wake: asyncio.Event, note: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake
        self._note = note

    def set(self) -> None:
        self._note()
        self._wake.set()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Runs calls at once, to their ends, and then raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    found = list[T]()
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def make_card(
    name: str, ready: Ready, lanes: tuple[str, ...], *, truncates: bool = False
) -> ModelCard:
    """The model card that this worker publishes."""
    sha256, _ = encode_tokenizer(ready.tokenizer)
    reasoning, tool_format = ready.tokenizer.reasoning, ready.tokenizer.tool_format
    if ready.pooling is not None:
        reasoning = tool_format = None
    can = replace(ready.capabilities, tools=tool_format is not None)
    if ready.pooling is not None and _SCORING_LANE in lanes:
        # Gateways take the first for a job that names none.
        lanes = (_SCORING_LANE, *(lane for lane in lanes if lane != _SCORING_LANE))
    return ModelCard(
        name=name,
        context_length=ready.context_length,
        vocab_size=ready.vocab_size,
        eos_token_ids=ready.eos_token_ids,
        tokenizer_sha256=sha256,
        created_s=int(time.time()),
        lanes=lanes,
        capabilities=can,
        reasoning_parser="" if reasoning is None else reasoning.name,
        tool_call_parser="" if tool_format is None else tool_format.name or _OWN_FORMAT,
        generation=ready.generation,
        pooling=ready.pooling,
        truncates=truncates,
    )
