"""A worker's calls of Redis: claims, appends, heartbeats, releases, subscriptions.

A worker serves one partition. Only its model's card and tokenizer are published in partition 0,
where gateways look models up.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import redis.asyncio
from msgspec.structs import replace

from contract.catalogue import Catalogue, clear_orphan, orphaned_jobs
from contract.codec import WarmPrompt, encode_tokenizer
from contract.connection import connect
from contract.consumer import listen
from contract.errors import BrokerFull
from contract.events import LogEntry
from contract.function_types import (
    Append,
    Blame,
    Claimed,
    Claims,
    LaneRoom,
    Release,
    Verdict,
    WorkerCapacity,
    WorkerState,
)
from contract.jobs import JobStatus
from contract.keys import Keys
from contract.library import check_fitness, ensure_library
from contract.model_cards import ModelCard, TokenizerFiles
from contract.partitions import MAX_PARTITIONS, PartitionsDiffer, known_number
from contract.payloads.store import ObjectStore
from contract.roster import Roster
from contract.starts import Starts
from workers.ipc.messages import EngineReady
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

_READ_EVENTS = 500
_ORPHANED_JOBS = 20  # per call
_SCORING_LANE = "scoring"  # the default of prefill-only models
_OWN_FORMAT = "template"  # the name of a format that only the model's chat template shows
_RENEWAL_INTERVAL = 0.05  # of a lease: appends renew leases at most this often

Verdicts = list[tuple[Verdict | JobStatus, int]]


class WorkerBroker:
    """The Redis calls of one worker incarnation. Each raises BrokerUnavailable."""

    def __init__(
        self,
        settings: WorkerSettings,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        client: redis.asyncio.Redis | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.incarnation = incarnation
        self._keys = Keys(settings.namespace, settings.partition)
        self._client = client or connect(settings.redis_url, self._keys)
        self._functions = Roster(self._client, self._keys)
        self.last_contact_s = clock()  # when the last call that renewed the leases was sent
        self._appends_renewed_s = -math.inf  # when an append last renewed

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ensure_library(self) -> None:
        await check_fitness(self._client)
        await ensure_library(self._client)

    async def publish_model(self, card: ModelCard, tokenizer: TokenizerFiles) -> None:
        """Publishes the model card and tokenizer, so that gateways accept jobs for the model.
        Raises PartitionsDiffer where the namespace has no such partition."""
        keys = Keys(self._settings.namespace)
        client = connect(self._settings.redis_url, keys) if self._keys.partition else self._client
        try:
            number = await known_number(client, keys, None)
            if self._keys.partition >= (number or MAX_PARTITIONS):
                raise PartitionsDiffer(
                    f"there is no partition {self._keys.partition}: the namespace "
                    f"{keys.namespace!r} has {number}, from 0 on"
                )
            await Catalogue(client, keys).publish(card, tokenizer)
        finally:
            if client is not self._client:
                await client.aclose()

    async def claim(
        self,
        *,
        lanes: Mapping[str, float],
        rooms: Mapping[str, LaneRoom],
        free_tokens: int = 0,
        is_idle: bool,
        config_version: str,
        prompt_token_s: float | None = None,
    ) -> Claims:
        """Claims from these lanes (name to minimum share) as far as there is room, then what other
        workers offer, if it has up to `free_tokens`. `is_idle`: the worker holds no job.
        `prompt_token_s`: as Functions.claim."""
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
            config_version=config_version + arm,
            prompt_token_s=prompt_token_s,
        )
        if is_idle:
            self._note_renewal(sent_s)
        return claimed

    async def warm_take(self, worth: Sequence[str | int]) -> tuple[float, WarmPrompt] | None:
        """As Functions.warm_take."""
        model = self._settings.served_model_name
        return await self._functions.warm_take(self.incarnation, model, worth)

    async def mine(self, known_ids: Sequence[str]) -> list[Claimed]:
        """The jobs of a claim whose reply was lost. `known_ids`: the jobs that the worker holds."""
        sent_s = self._clock()
        found = await self._functions.mine(
            self.incarnation, known_ids, lease_s=self._settings.lease_s
        )
        if not known_ids:
            self._note_renewal(sent_s)
        return found

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


def make_card(
    name: str,
    ready: EngineReady,
    lanes: tuple[str, ...],
    *,
    truncates: bool = False,
    path: str = "",
) -> ModelCard:
    """The model card that this worker publishes. `path`: of the model, or its id on the Hub."""
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
        hub_names=() if Path(path).expanduser().exists() else (path, Path(path).name),
    )
