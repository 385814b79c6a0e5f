"""Lists of jobs over the partitions that hold them, youngest first, in pages.

Pages are stable: a page begins behind a place in the order of all jobs (time of submission, then
id), whatever is added meanwhile. Each partition's clock tells the time of its jobs.
"""

from collections.abc import Sequence
from typing import Any

from contract.connection import broker_errors, repeated
from contract.function_types import JobPage, JobView, Wanted
from contract.keys import partition_of
from contract.shards import Shard

_YOUNGEST = "9007199254740991 ~"  # before all jobs


class JobLists:
    """The lists of one tenant ('': of all)."""

    def __init__(self, shards: Sequence[Shard], tenant: str, wanted: Wanted) -> None:
        self._shards = shards
        self._tenant = tenant
        self._wanted = wanted

    async def page(self, after: str, max_jobs: int) -> JobPage | None:
        """Jobs after the job `after`; None where that job is not in the list."""
        if len(self._shards) == 1:
            return await self._part(self._shards[0], after, max_jobs)
        place: str | None = _YOUNGEST
        if after:
            place = await self._place_of(after)
            if place is None:
                return None
        parts = list[JobPage]()
        for shard in self._shards:
            part = await self._part(shard, place or "", max_jobs)
            assert part is not None, "a place is no job that could be missing"
            parts.append(part)
        return _merged(parts, max_jobs)

    async def _part(self, shard: Shard, after: str, max_jobs: int) -> JobPage | None:
        list_jobs, whose = shard.functions.list_jobs, self._tenant
        return await shard.call(list_jobs, whose, self._wanted, after=after, max_jobs=max_jobs)

    async def _place_of(self, job_id: str) -> str | None:
        """The place of a job in the list."""
        number = partition_of(job_id)
        shard = next((each for each in self._shards if each.number == number), self._shards[0])
        jobs = shard.keys.of("jobs", self._tenant)

        async def created() -> Any:
            with broker_errors(shard.client, "ZSCORE"):
                return await repeated(lambda: shard.client.zscore(jobs, job_id))

        found = await shard.call(created)
        return None if found is None else f"{int(found)} {job_id}"


def _merged(parts: Sequence[JobPage], max_jobs: int) -> JobPage:
    """The page of all partitions: nothing behind a place up to which one of them was read."""
    ends = [_place(part.position) for part in parts if part.position]
    limit = max(ends, default=None)  # the youngest
    views = sorted((view for part in parts for view in part.views), key=_of_view, reverse=True)
    shown = [view for view in views if limit is None or _of_view(view) >= limit][:max_jobs]
    if len(shown) == max_jobs and (len(shown) < len(views) or limit is not None):
        return JobPage(tuple(shown), shown[-1].job.id)
    return JobPage(tuple(shown), "" if limit is None else limit[1])


def _place(position: str) -> tuple[int, str]:
    created, job_id = position.split(" ")
    return int(created), job_id


def _of_view(view: JobView) -> tuple[int, str]:
    return view.created_ms, view.job.id
