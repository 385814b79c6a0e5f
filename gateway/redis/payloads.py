"""Parts of jobs that are kept in the object store: long prompts and stored results.

Blocking stores run in threads. Raises PayloadError, which fails only the job's own request.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from cachetools import LRUCache
from msgspec.structs import replace

from contract.events import LogEntry
from contract.function_types import JobView
from contract.jobs import Job, StoredPrompt
from contract.payloads import open_store
from contract.payloads.encoding import decode_log, encode_prompts, with_prompts
from contract.payloads.store import (
    ObjectStore,
    PayloadError,
    PayloadUnavailable,
    prompt_key,
    response_key,
)

log = logging.getLogger("batchway.gateway")

_MAX_KEPT_LOGS = 8  # decoded results, for clients that read page by page
# A token id takes at most five bytes of msgpack, so shorter prompts need not be encoded.
_MAX_ID_BYTES = 5


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
