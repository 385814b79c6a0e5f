"""Fetches prompts from the object store. Jobs are held meanwhile, so their leases are renewed and
their places are kept. A prompt that cannot be fetched fails only its job."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from contract.connection import end_tasks
from contract.errors import BrokerUnavailable, CommandDenied, ErrorCode, WireError
from contract.function_types import Claimed, Release
from contract.jobs import Job, ObjectRef
from contract.payloads.encoding import with_prompts
from contract.payloads.store import ObjectStore, PayloadLost, PayloadUnavailable
from workers.supervisor.held_job import HeldJob
from workers.supervisor.holding import Holding
from workers.supervisor.publisher import Publisher
from workers.supervisor.worker_broker import WorkerBroker

log = logging.getLogger(__name__)

_MAX_AT_ONCE = 8
_ATTEMPTS = 3
_RETRY_S = 0.5


@dataclass(eq=False)
class PromptFetcher:
    """Calls `run` with each claim when its prompt is fetched."""

    _store: ObjectStore | None
    _broker: WorkerBroker
    _holding: Holding
    _publisher: Publisher
    _run: Callable[[Claimed], Awaitable[None]]

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    def begin(self, claimed: Claimed, place: HeldJob) -> None:
        """Fetches a job's prompt; holds `place` meanwhile."""
        self._holding.jobs[claimed.job.id] = place
        task = asyncio.create_task(self._fetch(claimed, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        if self._tasks:
            await end_tasks(*self._tasks)

    async def _fetch(self, claimed: Claimed, place: HeldJob) -> None:
        job = claimed.job
        try:
            async with self._slots:
                whole = await self._whole(job)
            if self._holding.get(job.id, claimed.epoch) is place:
                await self._run(replace(claimed, job=whole))
        except PayloadLost as exc:
            log.error("prompt lost job_id=%s: %s", job.id, exc)
            self._publisher.fail(place, ErrorCode.PAYLOAD_LOST, "its prompt or an image is lost")
        except PayloadUnavailable as exc:
            log.warning("no prompt job_id=%s: %s", job.id, exc)
            await self._release(place)
        except BrokerUnavailable:
            self._holding.drop(place)  # its lease will expire
        except (CommandDenied, WireError) as exc:
            log.error("job dropped: %s job_id=%s", exc, job.id)
            self._holding.drop(place)
        except Exception as exc:  # the record or the prompt is invalid
            log.error("job not started, failed job_id=%s error=%s", job.id, type(exc).__name__)
            self._publisher.fail(place, ErrorCode.POISON, "the job could not be started")

    async def _whole(self, job: Job) -> Job:
        """The job with its prompt and its images. Raises PayloadError."""
        if job.stored_prompt is not None:
            job = with_prompts(job, await self._object(job.stored_prompt.ref))
        images = [await self._object(ref) for ref in job.images]
        return replace(job, image_data=tuple(images))

    async def _object(self, ref: ObjectRef) -> bytes:
        """Raises PayloadError."""
        if self._store is None:
            raise PayloadUnavailable("this worker has no object store")
        for attempt in itertools.count(1):
            try:
                return await asyncio.to_thread(self._store.get, ref)
            except PayloadUnavailable:
                if attempt == _ATTEMPTS:
                    raise
                await asyncio.sleep(_RETRY_S * attempt)
        raise AssertionError("the loop has no other end")

    async def _release(self, place: HeldJob) -> None:
        """Releases the job at the cost of an attempt; after its last attempt the job fails."""
        text = "its prompt could not be read from the object store"
        release = Release(place.job.id, place.epoch, "error", ErrorCode.PAYLOAD_UNAVAILABLE, text)
        try:
            await self._broker.release([release])
        finally:
            self._holding.drop(place)
