"""GET /v1/jobs: a tenant's jobs, filtered. DELETE /v1/jobs/{id}: deletes one."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from contract.function_types import Wanted
from contract.jobs import DEFAULT_LANES, PUBLIC_STATUSES
from gateway.follow.job_objects import (
    JobId,
    JobObject,
    JobState,
    checked_id,
    job_object,
)
from gateway.follow.members import delete_whole
from gateway.http.errors import ApiError, UnknownJob, bad_request, invalid_value
from gateway.http.handlers import answers
from gateway.prepare.auth import JobsReader, JobsWriter
from gateway.routes.accepted_jobs import check_may_change
from gateway.state import ThisGateway

router = APIRouter(tags=["jobs"], responses=answers(401, 403, 429))

_METADATA = re.compile(r"metadata\[(.{1,64})\]")
_PARAMETERS = {"status", "lane", "model", "created_after", "limit", "after"}
_METADATA_PARAMETER = {
    "name": "metadata",
    "in": "query",
    "required": False,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
    "description": "jobs with these values under these names: `metadata[name]=value`",
    "style": "deepObject",
    "explode": True,
}


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedJob(BaseModel):
    id: str
    object: Literal["job"] = "job"
    deleted: Literal[True] = True


async def metadata_of(request: Request) -> dict[str, str]:
    """The metadata filters of the query. Raises ApiError for an unknown or repeated parameter."""
    names = [name[:80] for name, _ in request.query_params.multi_items()]
    metadata: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if names.count(name) > 1:
            raise invalid_value(name[:80], f"{name[:80]} appears twice")
        if match := _METADATA.fullmatch(name):
            metadata[match[1]] = value
        elif name not in _PARAMETERS:
            raise bad_request("unknown_parameter", f"unknown parameter: {name[:80]}", name[:80])
    return metadata


@router.get("/v1/jobs", openapi_extra={"parameters": [_METADATA_PARAMETER]})
async def list_jobs(
    caller: JobsReader,
    gateway: ThisGateway,
    metadata: Annotated[dict[str, str], Depends(metadata_of)],
    status: Annotated[JobState | None, Query()] = None,
    lane: str = "",
    model: str = "",
    created_after: Annotated[float, Query(ge=0, le=10**11, description="Unix seconds")] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(description="the `last_id` of the page before")] = "",
) -> JobList:
    """A page of the tenant's jobs, youngest first, without results."""
    broker = gateway.broker
    cards = (await broker.known.models()).values()
    lanes = {*DEFAULT_LANES, *(lane for card in cards for lane in card.lanes)}
    if lane and lane not in lanes:
        raise invalid_value("lane", f"lane must be one of {', '.join(sorted(lanes))}")
    statuses = PUBLIC_STATUSES[status] if status else frozenset()
    wanted = Wanted(statuses, lane, model, round(created_after * 1000), metadata)
    await broker.sweep()
    try:
        start = checked_id(after) if after else ""
        page = await broker.list_jobs(caller.tenant, wanted, after=start, max_jobs=limit)
    except UnknownJob:
        message = "after is no job that is kept here: start at the first page"
        raise invalid_value("after", message) from None
    jobs = [job_object(view) for view in page.views]
    return JobList(
        data=jobs,
        first_id=jobs[0].id if jobs else None,
        # If few jobs match, the search may have ended after the last match.
        last_id=page.position or (jobs[-1].id if jobs else None),
        has_more=bool(page.position),
    )


@router.delete("/v1/jobs/{job_id}", responses=answers(404, 409))
async def delete_job(caller: JobsWriter, gateway: ThisGateway, job_id: JobId) -> DeletedJob:
    """Deletes an ended job with its prompt, output and log; 409 if it has not ended."""
    await check_may_change(gateway.broker, caller, job_id)
    if await delete_whole(gateway.broker, job_id, caller.tenant) is not None:
        message = "the job has not ended: cancel it first"
        raise ApiError(409, "not_terminal", message, headers={"x-should-retry": "false"})
    return DeletedJob(id=job_id)
