"""What of a job does not lie in Redis: long prompts on their way in, kept results on their way out.

Blocking stores run in threads. Raises PayloadError, which errors.py makes an answer for that job.
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
from contract.payloads.store import ObjectStore, PayloadError, PayloadUnavailable, prompt_key

log = logging.getLogger("batchway.gateway")

_MAX_KEPT_LOGS = 8  # decoded, for callers that read one page by page
# A token id takes at most five bytes of msgpack: what cannot reach the limit is not encoded.
_MAX_ID_BYTES = 5


class Payloads:
    """One for each gateway. `setting` names the store, '' none. Raises ValueError."""

    def __init__(self, setting: str, min_bytes: int) -> None:
        self.store: ObjectStore | None = open_store(setting)
        self._min_bytes = min_bytes
        self._logs: LRUCache[str, list[LogEntry]] = LRUCache(_MAX_KEPT_LOGS)

    async def outsourced(self, job: Job) -> Job:
        """The job as Redis shall hold it: a long prompt is put into the store."""
        if self.store is None or job.num_prompt_tokens * _MAX_ID_BYTES < self._min_bytes:
            return job
        data = encode_prompts(job)
        if len(data) < self._min_bytes:
            return job
        ref = await asyncio.to_thread(self.store.put, prompt_key(job.id), data)
        stored = StoredPrompt(ref, job.num_prompt_tokens, job.num_prompts)
        return replace(job, prompt_ids=(), prompt_list=(), stored_prompt=stored)

    async def whole(self, job: Job) -> Job:
        """The job with its prompt."""
        if job.stored_prompt is None or any(job.prompts):
            return job
        return with_prompts(job, await asyncio.to_thread(self._known().get, job.stored_prompt.ref))

    async def joined(
        self, view: JobView, after: int, max_events: int, entries: Sequence[LogEntry]
    ) -> list[LogEntry]:
        """A page of a log that is kept in the store, all but its end, which Redis still has."""
        assert view.result is not None
        if (kept := self._logs.get(view.result.key)) is None:
            data = await asyncio.to_thread(self._known().get, view.result)
            kept = self._logs[view.result.key] = await asyncio.to_thread(decode_log, data)
        return [*kept[after : after + max_events], *entries][:max_events]

    async def discard(self, job_id: str) -> bool:
        """Deletes a job's objects; False where somebody must do so later."""
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
        """A presigned URL of a kept result; None where the log lies in Redis."""
        return None if view.result is None else self._known().url(view.result, ttl_s)

    def _known(self) -> ObjectStore:
        if self.store is None:
            raise PayloadUnavailable("this gateway is given no object store")
        return self.store
