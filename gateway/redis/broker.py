"""The gateway's operations on jobs in Redis: submit, read, follow, cancel; and the parts of jobs
that are kept in the object store: long prompts and stored results.

Each method of Broker raises BrokerUnavailable, at once if Redis failed a moment ago. The first call
opens the first connection, so a gateway can start while Redis is down.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from cachetools import TTLCache
from msgspec.structs import replace

from contract.api_keys import ApiKeys, Pepper
from contract.byte_cache import ByteCache
from contract.catalogue import clear_orphan, knows_key
from contract.connection import SWEEP_PAUSE_S
from contract.errors import (
    BatchwayError,
    BrokerFull,
    BrokerUnavailable,
    CommandDenied,
    ErrorCode,
    JobRefused,
    WireError,
)
from contract.events import LogEntry
from contract.function_types import (
    JobPage,
    JobView,
    Quote,
    Submission,
    Submitted,
    TenantLimits,
    Verdict,
    Wanted,
    Watched,
)
from contract.job_lists import JobLists
from contract.jobs import Job, JobStatus, ObjectRef, StoredPrompt
from contract.keys import in_partition, partition_of
from contract.outbox import CallbackState, callback_state
from contract.payloads import open_store
from contract.payloads.encoding import decode_log, encode_prompts, with_prompts
from contract.payloads.store import (
    ObjectStore,
    PayloadError,
    PayloadUnavailable,
    image_key,
    prompt_key,
    response_key,
)
from contract.replays import replay_of
from contract.starts import ANY_LANE, Starts
from gateway.http.errors import UnknownJob, readable
from gateway.redis.hints import Cursor, Idle, News, Reset, news_of
from gateway.redis.key_ring import KeyRing
from gateway.redis.known_models import KnownModels, WorkerWait
from gateway.redis.shards import GatewayShard, GatewayShards
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")

_MAX_KEPT_BYTES = 32 * 2**20  # of decoded results, for clients that read page by page
_DECODED = 6.5  # bytes of a decoded result for each of its object; measured: 2.6 to 6.1
# A token id takes at most five bytes of msgpack, so shorter prompts need not be encoded.
_MAX_ID_BYTES = 5

PAGE_EVENTS = 500  # of a log, per read
MAX_LISTINGS = 20  # calls for one page of a list; 10,000 jobs are searched
SWEEP_EVERY_S = 1.0
FIRST_LOOK_S = 0.02  # seconds until a new job's log is read if no hint arrives
SAFE_LOOK_S = 0.2  # if the subscription existed this long after the submit, no hint was missed
SOON_S = 0.005
_RETRY_S = 1.0  # of a report that Redis has not answered
_WANTED_S = 60.0  # for which a worker is wanted, beyond the cold start
_WARM_S = 3.0  # with a key's REMEMBERED_S no longer than a revoked key may be of use
_FOR_WANT = {ErrorCode.NO_WORKERS, ErrorCode.DEADLINE_INFEASIBLE}  # of a worker, if none lives

T = TypeVar("T")


class Payloads:
    """The object store of one gateway. `setting` names it; '' means none. Raises ValueError."""

    def __init__(self, setting: str, min_bytes: int) -> None:
        self.store: ObjectStore | None = open_store(setting)
        self._min_bytes = min_bytes
        self._logs: ByteCache[tuple[ObjectRef, list[LogEntry]]] = ByteCache(_MAX_KEPT_BYTES)

    async def offloaded(self, job: Job) -> Job:
        """Moves a job's long parts to the store. Returns the job as Redis will contain it."""
        if self.store is None:
            return job
        if len(job.response) >= self._min_bytes:
            key = response_key(job.id)
            ref = await asyncio.to_thread(self.store.put, key, job.response)
            job = replace(job, response=b"", stored_response=ref)
        if job.image_data:
            refs = [
                await asyncio.to_thread(self.store.put, image_key(job.id, number), data)
                for number, data in enumerate(job.image_data)
            ]
            job = replace(job, image_data=(), images=tuple(refs))
        num_ids = sum(map(len, job.prompts))
        if num_ids * _MAX_ID_BYTES < self._min_bytes:
            return job
        data = encode_prompts(job)
        if len(data) < self._min_bytes:
            return job
        ref = await asyncio.to_thread(self.store.put, prompt_key(job.id), data)
        stored = StoredPrompt(ref, num_ids, job.num_prompts)
        return replace(job, prompt_ids=(), prompt_list=(), stored_prompt=stored)

    async def whole(self, job: Job) -> Job:
        """Returns the job with its prompt."""
        if job.stored_prompt is None or any(job.prompts):
            return job
        return with_prompts(job, await asyncio.to_thread(self._known().get, job.stored_prompt.ref))

    async def with_images(self, job: Job) -> Job:
        """Returns the job with the bytes of its images, as before it was submitted."""
        data = [await asyncio.to_thread(self._known().get, ref) for ref in job.images]
        return replace(job, image_data=tuple(data), images=())

    async def response(self, job: Job) -> bytes:
        """Returns what is kept of the request of a response or a stored chat; else nothing."""
        if job.stored_response is None or job.response:
            return job.response
        return await asyncio.to_thread(self._known().get, job.stored_response)

    async def joined(
        self, view: JobView, after: int, max_events: int, entries: Sequence[LogEntry]
    ) -> list[LogEntry]:
        """Returns a page of a stored log. The End is not in the store but in Redis."""
        assert view.result is not None
        ref, kept = self._logs.get(view.job.id) or (None, [])
        if ref != view.result:
            data = await asyncio.to_thread(self._known().get, view.result)
            kept = await asyncio.to_thread(decode_log, data)
            num_bytes = int(_DECODED * len(data))
            self._logs.keep(view.job.id, (view.result, kept), num_bytes, view.job.tenant)
        return [*kept[after : after + max_events], *entries][:max_events]

    async def discard(self, job_id: str) -> bool:
        """Deletes a job's objects. Returns False if that must be repeated later."""
        if self.store is None:
            return False
        self._logs.drop(job_id)
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


class Broker:
    """The jobs in Redis, for one gateway process."""

    def __init__(
        self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self.clock = clock
        self.shards = GatewayShards(settings)
        first = self.shards.first  # has what is not a tenant's: models and keys
        # Of the events of the calls that wait here: a step's are one message.
        self.channel = secrets.token_hex(8)
        self._followed: Counter[str] = Counter()  # the jobs that callers follow here
        # Tenants and models for which little that was warmed was of use; they are tried again.
        self.unwarmed: TTLCache[tuple[str, str], bool] = TTLCache(maxsize=4096, ttl=60.0)
        self.known = KnownModels(self.shards, settings.declared_models)
        pepper = settings.key_pepper and Pepper(settings.key_pepper.encode())
        api_keys = ApiKeys(first.client, first.keys, pepper or None)
        self.key_ring = KeyRing(
            api_keys, first.call, own_key=settings.api_key, wants_key=settings.wants_key
        )
        self.payloads = Payloads(settings.object_store, settings.object_min_bytes)

    async def aclose(self) -> None:
        await self.known.aclose()
        await self.shards.aclose()

    async def enter(self, tenant: str, limits: TenantLimits) -> bool:
        """Counts a call against its tenant's limit of requests; False if there is none. Raises
        JobRefused."""
        if not limits.requests_per_min:
            return False
        shard = await self.shards.home(tenant)
        await shard.call(shard.functions.enter, tenant, limits)
        return True

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Queues a job in its tenant's partition, which its id names then. The calls of a flow are
        where it is. Raises JobRefused, PayloadUnavailable."""
        shard, placed, terms = await self._placed(job, submission)
        held = await self.payloads.offloaded(placed)
        try:
            submitted = await shard.call(shard.functions.submit, held, terms)
        except JobRefused as exc:
            await self._discard(held)
            await self._note_refusal(placed, exc)
            raise await self.known.explained(placed.model, shard, exc) from exc
        if submitted.job_id != placed.id:
            await self._discard(held)
        return submitted

    async def _placed(
        self, job: Job, submission: Submission
    ) -> tuple[GatewayShard, Job, Submission]:
        """The partition of a new job, the job with an id of it, and the submission with the
        partition's part of the fleet's bounds, which are equal. Those of a tenant stay as they are.
        """
        if (num := len(await self.shards.all())) == 1:
            return self.shards.first, job, submission
        s = submission
        shard = await (self.shards.of(job.id) if job.parent else self.shards.home(job.tenant))
        terms = replace(
            s,
            limits=replace(s.limits, lane_share=min(1.0, s.limits.lane_share * num)),
            lane_bound_tokens=_part(s.lane_bound_tokens, num),
            max_stored_bytes=_part(s.max_stored_bytes, num),
        )
        return shard, replace(job, id=in_partition(job.id, shard.number)), terms

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
            shard = await self.shards.of(job.id)
            if not await self.known.num_live_in(shard, job.model):
                await self.request_worker(shard, job.model, job.lane)

    async def warm(self, job: Job, num_known: int) -> None:
        """As Functions.warm."""
        shard = await self.shards.of(job.id)
        if await shard.call(shard.functions.warm, job, num_known, lives_s=_WARM_S):
            self.unwarmed[job.tenant, job.model] = True

    async def request_worker(self, shard: GatewayShard, model: str, lane: str = ANY_LANE) -> None:
        """Asks for a worker for a refused call: starters of workers see waiting jobs only. A
        failure changes nothing."""
        wanted_s = self._settings.cold_start_s + _WANTED_S
        starts = Starts(shard.client, shard.keys)
        with contextlib.suppress(BatchwayError):
            await shard.call(starts.want, model, lane, wanted_s)

    async def worker_wait(self, job: Job, status: JobStatus) -> WorkerWait | None:
        """The wait for a worker of a job with this status; None where it does not wait for one, or
        Redis does not answer: the job is accepted all the same."""
        with contextlib.suppress(BatchwayError):
            if status is JobStatus.QUEUED:
                return await self.known.worker_wait(job.model, await self.shards.of(job.id))
        return None

    async def knows_key(self, tenant: str, idempotency_key: str) -> bool:
        """Whether a job was accepted under this Idempotency-Key."""
        shard = await self.shards.home(tenant)
        return await shard.call(knows_key, shard.client, shard.keys, tenant, idempotency_key)

    async def quote(self, job: Job, submission: Submission) -> Quote:
        shard, placed, terms = await self._placed(job, submission)
        quote = await shard.call(shard.functions.quote, placed, terms)
        await self._note_refusal(placed, quote.refusal)
        refused = quote.refusal and await self.known.explained(job.model, shard, quote.refusal)
        return replace(quote, refusal=refused)

    async def _on_job(self, job_id: str, ask: Callable[[GatewayShard], Awaitable[T | None]]) -> T:
        """What a call replies for a job. Raises UnknownJob where it is None: the tenant has no such
        job."""
        shard = await self.shards.of(job_id)
        found = await shard.call(ask, shard)
        if found is None:
            raise UnknownJob(job_id)
        return found

    async def read(
        self, job_id: str, tenant: str, *, after: int = 0, max_events: int = 0
    ) -> tuple[JobView, list[LogEntry]]:
        """A job and a page of its log, from Redis or the object store. Raises UnknownJob,
        RecordUnreadable, PayloadError."""

        with readable("job"):
            found = await self._on_job(
                job_id,
                lambda shard: shard.functions.read(
                    job_id, tenant, after=after, max_events=max_events
                ),
            )
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
        found = await self.shards.each(lambda shard: shard.functions.watch(model, lanes))
        return Watched(
            tuple(job for each in found for job in each.held),
            tuple(tenant for each in found for tenant in each.waiting),
            sum(each.num_due_callbacks for each in found),
            sum(each.num_dead_callbacks for each in found),
        )

    async def replay_of(self, job_id: str) -> tuple[Job, Submission] | None:
        """An ended job as a new one; None if its record has expired. Raises RecordUnreadable."""
        shard = await self.shards.of(job_id)
        return await shard.ask("job", replay_of, shard.client, shard.keys, job_id)

    async def callback_state(self, job_id: str, tenant: str) -> CallbackState | None:
        """The state of the job's callback; None if it has none. Raises RecordUnreadable."""
        shard = await self.shards.of(job_id)
        names = shard.client, shard.keys, job_id, tenant
        return await shard.ask("callback", callback_state, *names)

    async def cancel(self, job_id: str, tenant: str) -> JobStatus:
        """Cancels a job and returns its status. Raises UnknownJob."""
        return await self._on_job(job_id, lambda shard: shard.functions.cancel(job_id, tenant))

    async def list_jobs(self, tenant: str, wanted: Wanted, *, after: str, max_jobs: int) -> JobPage:
        """A tenant's jobs after the job `after`, in order; perhaps fewer than `max_jobs`.
        Raises UnknownJob if `after` is not in the list."""
        shards = await self.shards.of_list(tenant)
        if after and (await self.shards.of(after)) not in shards:
            raise UnknownJob(after)
        lists = JobLists(shards, tenant, wanted)
        views: list[JobView] = []
        for _ in range(MAX_LISTINGS):
            page = await lists.page(after, max_jobs - len(views))
            if page is None:
                raise UnknownJob(after)
            views += page.views
            after = page.position
            if not after or len(views) == max_jobs:
                break
        return JobPage(tuple(views), after)

    async def delete(self, job_id: str, tenant: str) -> JobStatus | None:
        """Deletes an ended job, or returns another one's status. Raises UnknownJob."""

        shard = await self.shards.of(job_id)
        status = await shard.call(shard.functions.delete, job_id, tenant)
        if status is False:
            raise UnknownJob(job_id)
        if isinstance(status, JobStatus):
            return status
        if await self.payloads.discard(job_id):
            await shard.call(clear_orphan, shard.client, shard.keys, job_id)
        return None

    async def detach(
        self, job_id: str, tenant: str, *, deadline_s: float, retention_s: float
    ) -> None:
        """Turns a call's job into one that needs no caller. Raises UnknownJob."""
        terms = {"deadline_s": deadline_s, "retention_s": retention_s}
        await self._on_job(job_id, lambda shard: shard.functions.detach(job_id, tenant, **terms))

    async def reprioritise(self, job_id: str, tenant: str, **terms: Any) -> Verdict | JobStatus:
        """As Functions.reprioritise. Raises UnknownJob."""
        return await self._on_job(
            job_id, lambda shard: shard.functions.reprioritise(job_id, tenant, **terms)
        )

    async def events(
        self,
        job: Job,
        after: int = 0,
        after_hash: str | None = None,
        *,
        submitted_s: float | None = None,
    ) -> AsyncIterator[News]:
        """Follows a job's log from event `after` to its End; yields Idle at least once per poll
        interval. Tolerates that Redis is down for up to `outage_grace_s`. Raises UnknownJob.

        `submitted_s`: when a new job was submitted (the broker's clock). Its log is still empty, so
        reading it would only delay the worker; the follower waits for the first hint instead.
        """
        cursor = Cursor(after, after_hash)
        view: JobView | None = None
        answered_s = self.clock()
        shard = await self.shards.of(job.id)
        channel = shard.keys.of("ev", job.channel or job.id)
        async with self._following(job.id), shard.hints.listen(channel, job.id) as mailbox:
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
                    for news in news_of(cursor.next_of(hints)):
                        yield news
                        if isinstance(news, LogEntry):
                            return
                    if cursor.misses_some_of(hints):
                        break
                    answered_s = self.clock()
                try:
                    view, items, is_whole = await self._next_page(job, cursor)
                except BrokerUnavailable:
                    if self.clock() - answered_s > self._settings.outage_grace_s:
                        raise
                    yield Idle(None)
                    await asyncio.sleep(self._settings.poll_s)
                    is_whole = False
                    continue
                answered_s = self.clock()
                for news in items:
                    yield news
                    if isinstance(news, LogEntry):
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
                for number in {partition_of(job_id) for job_id in self._followed}:
                    if not await self._attend(number):
                        pause_s = min(pause_s, _RETRY_S)  # before a sweep finds it lapsed

    async def _attend(self, number: int) -> bool:
        """Whether the partition of the number has answered."""
        job_ids = [job_id for job_id in self._followed if partition_of(job_id) == number]
        try:
            shard = await self.shards.of(job_ids[0])
            await shard.call(shard.functions.attend, job_ids)
        except BrokerUnavailable:
            return False
        except (CommandDenied, WireError):
            pass
        return True

    def _first_look_s(self, submitted_s: float) -> float:
        return SAFE_LOOK_S if self.clock() - submitted_s < SOON_S else FIRST_LOOK_S

    async def _next_page(self, job: Job, cursor: Cursor) -> tuple[JobView, Sequence[News], bool]:
        """Returns the job, what is new in its log, and whether the log has no more at present."""
        view, entries = await self.read(
            job.id, job.tenant, after=cursor.read_after, max_events=PAGE_EVENTS
        )
        if not cursor.agrees_with(view, entries):
            cursor.reset()
            return view, [Reset()], False
        return view, news_of(cursor.next_of(entries)), view.ends_with(entries)

    async def sweep(self) -> None:
        """Ends jobs past their deadlines and leases, at most once a second; ignores failures."""
        with contextlib.suppress(BrokerUnavailable):  # the breaker logs it
            shards = await self.shards.all()
            await asyncio.gather(*(self._sweep(shard) for shard in shards))

    async def _sweep(self, shard: GatewayShard) -> None:
        now_s = self.clock()
        if now_s - shard.swept_s < SWEEP_EVERY_S:
            return
        shard.swept_s = now_s
        try:
            await shard.call(shard.functions.sweep)
        except BrokerFull:
            shard.swept_s = now_s + SWEEP_PAUSE_S - SWEEP_EVERY_S
        except BrokerUnavailable:
            return  # the breaker logs it
        except (CommandDenied, WireError) as exc:
            log.info("no sweep: %s", exc)


def _part(bound: int, num_partitions: int) -> int:
    """A partition's part of a bound; 0: there is none."""
    return bound and max(1, bound // num_partitions)
