"""The gateway's operations on jobs in Redis: submit, read, follow, cancel; and the parts of jobs
that are kept in the object store: long prompts and stored results.

Each method of Broker raises BrokerUnavailable, at once if Redis failed a moment ago. The first call
opens the first connection, so a gateway can start while Redis is down.

Over 300 lines: one short method for each operation.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from cachetools import LRUCache
from msgspec.structs import replace

from contract.api_keys import ApiKeys, Pepper
from contract.batches import Batches
from contract.catalogue import clear_orphan, knows_key
from contract.connection import SWEEP_PAUSE_S, connect
from contract.errors import (
    BatchwayError,
    BrokerFull,
    BrokerUnavailable,
    BrokerUnfit,
    CommandDenied,
    ErrorCode,
    JobRefused,
    WireError,
)
from contract.events import LogEntry
from contract.files import Files
from contract.function_types import (
    JobPage,
    JobView,
    Quote,
    Submission,
    Submitted,
    TenantLimits,
    Wanted,
    Watched,
)
from contract.functions import Functions
from contract.jobs import Job, JobStatus, StoredPrompt
from contract.keys import Keys
from contract.library import check_fitness, ensure_library
from contract.operations import Operations
from contract.outbox import CallbackState, Outbox, callback_state
from contract.pauses import Pauses
from contract.payloads import open_store
from contract.payloads.encoding import decode_log, encode_prompts, with_prompts
from contract.payloads.store import (
    ObjectStore,
    PayloadError,
    PayloadUnavailable,
    prompt_key,
    response_key,
)
from contract.replays import replay_of
from contract.starts import ANY_LANE, Starts
from gateway.http.errors import UnknownJob, readable
from gateway.redis.hints import Cursor, Hints, Idle, Reset, is_end
from gateway.redis.key_ring import KeyRing
from gateway.redis.known_models import KnownModels, WorkerWait
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")

_MAX_KEPT_LOGS = 8  # decoded results, for clients that read page by page
# A token id takes at most five bytes of msgpack, so shorter prompts need not be encoded.
_MAX_ID_BYTES = 5

MAX_CALLS = 128  # concurrent calls, each on its own connection; others wait
PAGE_EVENTS = 500  # of a log, per read
MAX_LISTINGS = 20  # calls for one page of a list; 10,000 jobs are searched
SWEEP_EVERY_S = 1.0
FIRST_LOOK_S = 0.02  # seconds until a new job's log is read if no hint arrives
SAFE_LOOK_S = 0.2  # if the subscription existed this long after the submit, no hint was missed
SOON_S = 0.005
_RETRY_S = 1.0  # of a report that Redis has not answered
_WANTED_S = 60.0  # for which a worker is wanted, beyond the cold start
_FOR_WANT = {ErrorCode.NO_WORKERS, ErrorCode.DEADLINE_INFEASIBLE}  # of a worker, if none lives

T = TypeVar("T")


class Payloads:
    """The object store of one gateway. `setting` names it; '' means none. Raises ValueError."""

    def __init__(self, setting: str, min_bytes: int) -> None:
        self.store: ObjectStore | None = open_store(setting)
        self._min_bytes = min_bytes
        self._logs: LRUCache[str, list[LogEntry]] = LRUCache(_MAX_KEPT_LOGS)

    async def outsourced(self, job: Job) -> Job:
        """Moves a job's long parts to the store. Returns the job as Redis will contain it."""
        if self.store is None:
            return job
        if len(job.response) >= self._min_bytes:
            key = response_key(job.id)
            ref = await asyncio.to_thread(self.store.put, key, job.response)
            job = replace(job, response=b"", stored_response=ref)
        if job.num_prompt_tokens * _MAX_ID_BYTES < self._min_bytes:
            return job
        data = encode_prompts(job)
        if len(data) < self._min_bytes:
            return job
        ref = await asyncio.to_thread(self.store.put, prompt_key(job.id), data)
        stored = StoredPrompt(ref, job.num_prompt_tokens, job.num_prompts)
        return replace(job, prompt_ids=(), prompt_list=(), stored_prompt=stored)

    async def whole(self, job: Job) -> Job:
        """Returns the job with its prompt."""
        if job.stored_prompt is None or any(job.prompts):
            return job
        return with_prompts(job, await asyncio.to_thread(self._known().get, job.stored_prompt.ref))

    async def response(self, job: Job) -> bytes:
        """Returns what /v1/responses keeps of the job's request; empty for other jobs."""
        if job.stored_response is None or job.response:
            return job.response
        return await asyncio.to_thread(self._known().get, job.stored_response)

    async def joined(
        self, view: JobView, after: int, max_events: int, entries: Sequence[LogEntry]
    ) -> list[LogEntry]:
        """Returns a page of a stored log. The End is not in the store but in Redis."""
        assert view.result is not None
        if (kept := self._logs.get(view.result.key)) is None:
            data = await asyncio.to_thread(self._known().get, view.result)
            kept = self._logs[view.result.key] = await asyncio.to_thread(decode_log, data)
        return [*kept[after : after + max_events], *entries][:max_events]

    async def discard(self, job_id: str) -> bool:
        """Deletes a job's objects. Returns False if that must be repeated later."""
        if self.store is None:
            return False
        for key in [key for key in self._logs if key.startswith(job_id)]:
            del self._logs[key]
        with contextlib.suppress(PayloadError):
            await asyncio.to_thread(self.store.delete_job, job_id)
            return True
        log.warning("objects not deleted yet job_id=%s", job_id)
        return False

    def url(self, view: JobView, ttl_s: float) -> str | None:
        """A presigned URL of a stored result; None if the log is in Redis."""
        return None if view.result is None else self._known().url(view.result, ttl_s)

    def _known(self) -> ObjectStore:
        if self.store is None:
            raise PayloadUnavailable("this gateway is given no object store")
        return self.store


class Breaker:
    """Opens when a call fails. After a while, one call at a time may try."""

    def __init__(self, open_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_s = open_s
        self._clock_s = clock_s
        self._open_until_s: float | None = None
        self._is_probing = False
        self._away_since_s: float | None = None

    def check(self) -> None:
        """Raises BrokerUnavailable if a call would be rejected."""
        if self._open_until_s is not None and (
            self._is_probing or self._clock_s() < self._open_until_s
        ):
            raise BrokerUnavailable("Redis did not answer a moment ago")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Surrounds one call. Raises BrokerUnavailable at once while open."""
        self.check()
        is_probe = self._is_probing = self._open_until_s is not None
        try:
            yield
        except (BrokerFull, BrokerUnfit, CommandDenied):
            self._note_answer()
            raise
        except BrokerUnavailable as exc:
            self._open_until_s = self._clock_s() + self._open_s
            self._note_absence(exc)
            raise
        else:
            self._note_answer()
        finally:
            if is_probe:
                self._is_probing = False

    def _note_absence(self, exc: BrokerUnavailable) -> None:
        if self._away_since_s is None:
            self._away_since_s = self._clock_s()
            log.warning("no answer from Redis: %s", exc)

    def _note_answer(self) -> None:
        self._open_until_s = None
        if self._away_since_s is not None:
            log.info("Redis answers again after %.0f s", self._clock_s() - self._away_since_s)
            self._away_since_s = None


class Broker:
    """The jobs in Redis, for one gateway process."""

    def __init__(
        self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self.clock = clock
        self.keys = Keys(settings.namespace)
        self._client = connect(settings.redis_url, self.keys)
        self._functions = Functions(self._client, self.keys)
        self._outbox = Outbox(self._client, self.keys)
        self._files = Files(self._client, self.keys)
        self._batches = Batches(self._client, self.keys)
        self._operations = Operations(self._client, self.keys)
        self._pauses = Pauses(self._client, self.keys)
        self._starts = Starts(self._client, self.keys)
        self._breaker = Breaker(settings.breaker_open_s)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._has_library = False
        self._followed: Counter[str] = Counter()  # the jobs that callers follow here
        self.known = KnownModels(self._call, self._client, self.keys, settings.declared_models)
        pepper = settings.key_pepper and Pepper(settings.key_pepper.encode())
        api_keys = ApiKeys(self._client, self.keys, pepper or None)
        self.key_ring = KeyRing(api_keys, self._call, own_key=settings.api_key)
        self.payloads = Payloads(settings.object_store, settings.object_min_bytes)
        self._hints = Hints(
            connect(settings.redis_url, self.keys), max_bytes=settings.max_buffer_bytes
        )
        self._swept_s = 0.0

    async def aclose(self) -> None:
        for part in (self.known, self._hints, self._client):
            await part.aclose()

    async def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Returns the function's result. Raises BrokerUnavailable, at once if Redis failed a moment
        ago; BrokerUnfit; CommandDenied, which it logs; and what the function raises."""
        self._breaker.check()
        async with self._slots:
            try:
                with self._breaker.guard():
                    if not self._has_library:
                        await self._load_library()
                    return await function()
            except CommandDenied as exc:
                log.error("%s", exc)
                raise

    async def _load_library(self) -> None:
        await check_fitness(self._client)
        await ensure_library(self._client)
        self._has_library = True

    async def enter(self, tenant: str, limits: TenantLimits) -> bool:
        """Counts a call against its tenant's limit of requests; False if there is none. Raises
        JobRefused."""
        if not limits.requests_per_min:
            return False
        await self._call(lambda: self._functions.enter(tenant, limits))
        return True

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Queues a job. Raises JobRefused, PayloadUnavailable."""
        held = await self.payloads.outsourced(job)
        try:
            submitted = await self._call(lambda: self._functions.submit(held, submission))
        except JobRefused as exc:
            await self._discard(held)
            await self._note_refusal(job, exc)
            raise await self.known.explained(job.model, exc) from exc
        if submitted.job_id != job.id:
            await self._discard(held)
        return submitted

    async def _discard(self, held: Job) -> None:
        """Deletes the objects of a job that was not accepted."""
        if held.has_objects:
            await self.payloads.discard(held.id)

    async def _note_refusal(self, job: Job, refusal: JobRefused | None) -> None:
        """Asks for a worker if the call was refused for want of one, also because its deadline does
        not allow a cold start: its next try would find none either. A failure changes nothing."""
        if refusal is None or refusal.code not in _FOR_WANT:
            return
        with contextlib.suppress(BatchwayError):
            if not await self.known.num_live_workers(job.model):
                await self.want_worker(job.model, job.lane)

    async def want_worker(self, model: str, lane: str = ANY_LANE) -> None:
        """Asks for a worker for a refused call: starters of workers see waiting jobs only. A
        failure changes nothing."""
        wanted_s = self._settings.cold_start_s + _WANTED_S
        with contextlib.suppress(BatchwayError):
            await self._call(lambda: self._starts.want(model, lane, wanted_s))

    async def worker_wait(self, job: Job, status: JobStatus) -> WorkerWait | None:
        """The wait for a worker of a job with this status; None where it does not wait for one, or
        Redis does not answer: the job is accepted all the same."""
        with contextlib.suppress(BatchwayError):
            return await self.known.worker_wait(job.model) if status is JobStatus.QUEUED else None
        return None

    async def knows_key(self, tenant: str, idempotency_key: str) -> bool:
        """Whether a job was accepted under this Idempotency-Key."""
        return await self._call(lambda: knows_key(self._client, self.keys, tenant, idempotency_key))

    async def quote(self, job: Job, submission: Submission) -> Quote:
        quote = await self._call(lambda: self._functions.quote(job, submission))
        await self._note_refusal(job, quote.refusal)
        refusal = quote.refusal and await self.known.explained(job.model, quote.refusal)
        return replace(quote, refusal=refusal)

    async def read(
        self, job_id: str, tenant: str, *, after: int = 0, max_events: int = 0
    ) -> tuple[JobView, list[LogEntry]]:
        """A job and a page of its log, from Redis or the object store. Raises UnknownJob,
        RecordUnreadable, PayloadError."""
        with readable("job"):
            found = await self._call(
                lambda: self._functions.read(job_id, tenant, after=after, max_events=max_events)
            )
        if found is None:
            raise UnknownJob(job_id)
        view, entries = found
        if view.result is None or not max_events or after >= view.next_number - 2:
            return found  # at most the End is missing
        return view, await self.payloads.joined(view, after, max_events, entries)

    async def log(self, job_id: str, tenant: str, *, up_to: int) -> AsyncIterator[LogEntry]:
        """Yields the current events 1 to `up_to` of the log. Raises UnknownJob."""
        number = 0
        while number < up_to:
            max_events = min(PAGE_EVENTS, up_to - number)
            _, entries = await self.read(job_id, tenant, after=number, max_events=max_events)
            if not entries:
                return
            for entry in entries:
                yield entry
            number = entries[-1].number

    async def watch(self, model: str, lanes: Sequence[str]) -> Watched:
        """The jobs that a model's workers hold and the tenants that wait. Raises BrokerUnavailable,
        WireError."""
        return await self._call(lambda: self._functions.watch(model, lanes))

    async def ask_outbox(self, ask: Callable[[Outbox], Awaitable[T]]) -> T:
        """One call to the outbox of callbacks. Raises WireError."""
        return await self._call(lambda: ask(self._outbox))

    async def drain(self, incarnation: str) -> bool:
        """Orders a worker to drain; False if there is none. Raises BrokerUnavailable."""
        [is_there] = await self._call(lambda: self._functions.drain([incarnation]))
        return is_there

    async def ask_pauses(self, ask: Callable[[Pauses], Awaitable[T]]) -> T:
        """One call to what is paused. Raises TooManyPauses, PausedByOperator, WireError."""
        return await self._call(lambda: ask(self._pauses))

    async def ask_operations(self, ask: Callable[[Operations], Awaitable[T]]) -> T:
        """One call to operations on many jobs. Raises LeaseLost, OperationsFull,
        RecordUnreadable."""
        with readable("operation"):
            return await self._call(lambda: ask(self._operations))

    async def replay_of(self, job_id: str) -> tuple[Job, Submission] | None:
        """An ended job as a new one; None if its record has expired. Raises RecordUnreadable."""
        with readable("job"):
            return await self._call(lambda: replay_of(self._client, self.keys, job_id))

    async def ask_files(self, ask: Callable[[Files], Awaitable[T]]) -> T:
        """One call to the records of files. Raises RecordUnreadable."""
        with readable("file"):
            return await self._call(lambda: ask(self._files))

    async def ask_batches(self, ask: Callable[[Batches], Awaitable[T]]) -> T:
        """One call to the records of batches. Raises LeaseLost, StatusChanged, RecordUnreadable."""
        with readable("batch"):
            return await self._call(lambda: ask(self._batches))

    async def callback_state(self, job_id: str, tenant: str) -> CallbackState | None:
        """The state of the job's callback; None if it has none. Raises RecordUnreadable."""
        with readable("callback"):
            return await self._call(lambda: callback_state(self._client, self.keys, job_id, tenant))

    async def cancel(self, job_id: str, tenant: str) -> JobStatus:
        """Cancels a job and returns its status. Raises UnknownJob."""
        status = await self._call(lambda: self._functions.cancel(job_id, tenant))
        if status is None:
            raise UnknownJob(job_id)
        return status

    async def list_jobs(self, tenant: str, wanted: Wanted, *, after: str, max_jobs: int) -> JobPage:
        """A tenant's jobs after the job `after`, youngest first; perhaps fewer than `max_jobs`.
        Raises UnknownJob if `after` is not in the list."""
        views: list[JobView] = []
        for _ in range(MAX_LISTINGS):
            room = max_jobs - len(views)
            page = await self._list(tenant, wanted, after, room)
            views += page.views
            after = page.position
            if not after or len(views) == max_jobs:
                break
        return JobPage(tuple(views), after)

    async def _list(self, tenant: str, wanted: Wanted, after: str, max_jobs: int) -> JobPage:
        page = await self._call(
            lambda: self._functions.list_jobs(tenant, wanted, after=after, max_jobs=max_jobs)
        )
        if page is None:
            raise UnknownJob(after)
        return page

    async def delete(self, job_id: str, tenant: str) -> JobStatus | None:
        """Deletes an ended job, or returns another one's status. Raises UnknownJob."""
        found = await self._call(lambda: self._functions.delete(job_id, tenant))
        if found is False:
            raise UnknownJob(job_id)
        if found is not True:
            return found
        if await self.payloads.discard(job_id):
            await self._call(lambda: clear_orphan(self._client, self.keys, job_id))
        return None

    async def detach(
        self, job_id: str, tenant: str, *, deadline_s: float, retention_s: float
    ) -> None:
        """Turns a call's job into one that needs no caller. Raises UnknownJob."""
        status = await self._call(
            lambda: self._functions.detach(
                job_id, tenant, deadline_s=deadline_s, retention_s=retention_s
            )
        )
        if status is None:
            raise UnknownJob(job_id)

    async def reprioritise(
        self, job_id: str, tenant: str, *, lane: str, deadline_s: float | None
    ) -> JobStatus | None:
        """Changes a job's lane or deadline. The status if it has ended. Raises UnknownJob."""
        status = await self._call(
            lambda: self._functions.reprioritise(job_id, tenant, lane=lane, deadline_s=deadline_s)
        )
        if status is None:
            raise UnknownJob(job_id)
        return status if isinstance(status, JobStatus) else None

    async def events(
        self,
        job_id: str,
        tenant: str,
        after: int = 0,
        after_hash: str | None = None,
        *,
        submitted_s: float | None = None,
    ) -> AsyncIterator[LogEntry | Idle | Reset]:
        """Follows a job's log from event `after` to its End; yields Idle at least once per poll
        interval. Tolerates that Redis is down for up to `outage_grace_s`. Raises UnknownJob.

        `submitted_s`: when a new job was submitted (the broker's clock). Its log is still empty, so
        reading it would only delay the worker; the follower waits for the first hint instead.
        """
        cursor = Cursor(after, after_hash)
        view: JobView | None = None
        answered_s = self.clock()
        channel = self.keys.of("ev", job_id)
        async with self._following(job_id), self._hints.listen(channel) as mailbox:
            is_whole, wait_s = False, self._settings.poll_s
            if submitted_s is not None:
                is_whole, wait_s = True, min(wait_s, self._first_look_s(submitted_s))
            while True:
                while is_whole:
                    hints = await mailbox.take(wait_s)
                    wait_s = self._settings.poll_s
                    if hints is None:
                        yield Idle(view)
                        await self.sweep()
                        break
                    for entry in cursor.next_of(hints):
                        yield entry
                        if is_end(entry):
                            return
                    if cursor.misses_some_of(hints):
                        break
                    answered_s = self.clock()
                try:
                    view, items, is_whole = await self._next_page(job_id, tenant, cursor)
                except BrokerUnavailable:
                    if self.clock() - answered_s > self._settings.outage_grace_s:
                        raise
                    yield Idle(None)
                    await asyncio.sleep(self._settings.poll_s)
                    is_whole = False
                    continue
                answered_s = self.clock()
                for item in items:
                    yield item
                    if is_end(item):
                        return
                if is_whole and view.is_terminal:
                    return  # the caller has the End already

    @contextlib.asynccontextmanager
    async def _following(self, job_id: str) -> AsyncIterator[None]:
        """A context during which the job has a caller."""
        self._followed[job_id] += 1
        try:
            yield
        finally:
            self._followed[job_id] -= 1
            if not self._followed[job_id]:
                del self._followed[job_id]

    async def report_attendance(self) -> None:
        """Reports that the followed jobs have callers, until cancelled."""
        pause_s = self._settings.attendance_s / 3
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._settings.attendance_s / 3
            if self._followed:
                try:
                    await self._call(lambda: self._functions.attend(list(self._followed)))
                except BrokerUnavailable:
                    pause_s = min(pause_s, _RETRY_S)  # before a sweep finds it lapsed
                except (CommandDenied, WireError):
                    pass

    def _first_look_s(self, submitted_s: float) -> float:
        return SAFE_LOOK_S if self.clock() - submitted_s < SOON_S else FIRST_LOOK_S

    async def _next_page(
        self, job_id: str, tenant: str, cursor: Cursor
    ) -> tuple[JobView, Sequence[LogEntry | Reset], bool]:
        """Returns the job, the new items of its log, and whether the log has no more at present."""
        view, entries = await self.read(
            job_id, tenant, after=cursor.read_after, max_events=PAGE_EVENTS
        )
        if not cursor.agrees_with(view, entries):
            cursor.reset()
            return view, [Reset()], False
        return view, cursor.next_of(entries), len(entries) < PAGE_EVENTS

    async def sweep(self) -> None:
        """Ends jobs past their deadlines and leases, at most once a second; ignores failures."""
        now_s = self.clock()
        if now_s - self._swept_s < SWEEP_EVERY_S:
            return
        self._swept_s = now_s
        try:
            await self._call(self._functions.sweep)
        except BrokerFull:
            self._swept_s = now_s + SWEEP_PAUSE_S - SWEEP_EVERY_S
        except BrokerUnavailable:
            return  # the breaker logs it
        except (CommandDenied, WireError) as exc:
            log.info("no sweep: %s", exc)
