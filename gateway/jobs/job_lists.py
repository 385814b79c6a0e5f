"""GET /v1/jobs: a tenant's jobs, found by what they are. DELETE /v1/jobs/{id}: forgets one."""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.calls import Wanted
from contract.jobs import DEFAULT_LANES, PUBLIC_STATUSES, JobStatus, ModelCard
from gateway.http.auth import JobsReader, JobsWriter
from gateway.http.errors import ApiError, UnknownJob, bad_request, invalid_value
from gateway.http.routing import Route
from gateway.jobs.job_objects import checked_id, job_object
from gateway.openai.sync_answers import check_may_change, gateway_of, json_response

router = APIRouter(route_class=Route)

T = TypeVar("T")

DEFAULT_JOBS = 20
MAX_JOBS = 100
_METADATA = re.compile(r"metadata\[(.{1,64})\]")
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,6})?")


@router.get("/v1/jobs")
async def list_jobs(request: Request, caller: JobsReader) -> Response:
    """A page of the tenant's jobs, the youngest first, without their results."""
    query = _unique(request)
    max_jobs = _limit(query.pop("limit", ""))
    after = query.pop("after", "")
    broker = gateway_of(request).broker
    wanted = _wanted(query, _lanes_of((await broker.known.models()).values()))
    await broker.sweep()
    try:
        start = checked_id(after) if after else ""
        page = await broker.list_jobs(caller.tenant, wanted, after=start, max_jobs=max_jobs)
    except UnknownJob:
        message = "after is no job that is kept here: start at the first page"
        raise invalid_value("after", message) from None
    jobs = [job_object(view) for view in page.views]
    return json_response(
        {
            "object": "list",
            "data": jobs,
            "first_id": jobs[0]["id"] if jobs else None,
            # Where jobs that match are rare, the search stands behind the last one found.
            "last_id": page.position or (jobs[-1]["id"] if jobs else None),
            "has_more": bool(page.position),
        }
    )


@router.delete("/v1/jobs/{job_id}")
async def delete_job(request: Request, caller: JobsWriter, job_id: str) -> Response:
    """Forgets a job that has ended: prompt, output, log. 409 where it has not ended."""
    broker = gateway_of(request).broker
    await check_may_change(broker, caller, checked_id(job_id))
    status = await broker.delete(job_id, caller.tenant)
    if status is not None:
        message = "the job has not ended: cancel it first"
        raise ApiError(409, "not_terminal", message, headers={"x-should-retry": "false"})
    return json_response({"id": job_id, "object": "job", "deleted": True})


def _unique(request: Request) -> dict[str, str]:
    """The query's parameters. Raises ApiError where one appears twice."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in query:
            raise invalid_value(name[:80], f"{name[:80]} appears twice")
        query[name] = value
    return query


def _limit(raw: str) -> int:
    if not raw:
        return DEFAULT_JOBS
    if not (raw.isascii() and raw.isdigit() and 1 <= int(raw[:9]) <= MAX_JOBS):
        raise invalid_value("limit", f"limit must be from 1 to {MAX_JOBS}")
    return int(raw)


def _lanes_of(cards: Collection[ModelCard]) -> set[str]:
    """Where jobs may lie: the usual lanes, and those that operators have added."""
    return {*DEFAULT_LANES, *(lane for card in cards for lane in card.lanes)}


def _wanted(query: Mapping[str, str], lanes: Collection[str]) -> Wanted:
    """What the rest of the query asks for. Raises ApiError."""
    statuses: frozenset[JobStatus] = frozenset()
    lane = model = ""
    created_after_ms = 0
    metadata: dict[str, str] = {}
    for name, value in query.items():
        if name == "status":
            statuses = _choice(name, value, PUBLIC_STATUSES)
        elif name == "lane":
            lane = _choice(name, value, {lane: lane for lane in sorted(lanes)})
        elif name == "model":
            model = value
        elif name == "created_after":
            created_after_ms = _milliseconds(name, value)
        elif match := _METADATA.fullmatch(name):
            metadata[match[1]] = value
        else:
            raise bad_request("unknown_parameter", f"unknown parameter: {name[:80]}", name[:80])
    return Wanted(statuses, lane, model, created_after_ms, metadata)


def _choice(name: str, value: str, choices: Mapping[str, T]) -> T:
    if value not in choices:
        raise invalid_value(name, f"{name} must be one of {', '.join(choices)}")
    return choices[value]


def _milliseconds(name: str, value: str) -> int:
    if not _SECONDS.fullmatch(value):
        raise invalid_value(name, f"{name} must be a Unix time in seconds")
    return round(float(value) * 1000)
