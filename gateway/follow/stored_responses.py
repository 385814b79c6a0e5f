"""Reads stored responses, by their ids, from the records and logs of their jobs."""

import re
from collections.abc import Callable
from typing import Any

from contract.answers import response_logprobs
from contract.errors import BrokerUnavailable
from contract.events import LogEntry
from contract.function_types import JobView
from contract.jobs import Endpoint, Job
from contract.response_events import STATUSES, ResponseEvents, ResponseRecord, decode_record
from gateway.http.errors import ApiError, UnknownJob, not_found
from gateway.state import Gateway

_RESPONSE_ID = re.compile(r"resp_(\d{1,4}-[0-9a-f]{32})")
_ITEM_ID = re.compile(r"[a-z]{2,3}_(\d{1,4}-[0-9a-f]{32})-\d{1,6}")


def job_of_response(response_id: str, param: str | None = None) -> str:
    """The id of a response's job. Raises ApiError, as for an unknown response."""
    found = _RESPONSE_ID.fullmatch(response_id)
    if found is None:
        raise no_such_response(param)
    return f"job-{found[1]}"


def response_of_item(item_id: str) -> str | None:
    """The response that gave an item its id; None for ids of others."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def no_such_response(param: str | None = None) -> ApiError:
    """The error for an unknown response; with OpenAI's own code if the call should continue it."""
    code = "response_not_found"
    if param == "previous_response_id":
        return not_found("the previous response", f"previous_{code}", param)
    return not_found("this response", code, param)


async def read_response(
    gateway: Gateway, response_id: str, tenant: str, param: str | None = None
) -> tuple[JobView, ResponseRecord]:
    """Returns the job and the record of a stored response. Raises ApiError (404), PayloadError."""
    try:
        view, _ = await gateway.broker.read(job_of_response(response_id, param), tenant)
    except UnknownJob:
        raise no_such_response(param) from None
    record = await record_of_job(gateway, view.job)
    if record is None or not record.is_stored:
        raise no_such_response(param)
    return view, record


async def record_of_job(gateway: Gateway, job: Job) -> ResponseRecord | None:
    """The request that the job answers; None for jobs of other endpoints. Raises PayloadError."""
    if job.endpoint is not Endpoint.RESPONSES:
        return None
    return decode_record(await gateway.broker.payloads.response(job))


async def replay(gateway: Gateway, view: JobView, add: Callable[[LogEntry], object]) -> None:
    """Adds all events of a job that has ended. Raises BrokerUnavailable if not all are there."""
    number, up_to = 0, view.next_number - 1
    async for entry in gateway.broker.log(view.job.id, view.job.tenant, up_to=up_to):
        add(entry)
        number = entry.number
    if number < up_to:
        raise BrokerUnavailable("Redis lost a part of the log between two reads")


async def ended_response(gateway: Gateway, view: JobView, record: ResponseRecord) -> dict[str, Any]:
    """The response of a job that has ended, from its log."""
    logprobs = response_logprobs(await gateway.tokenizer_for(view.job))
    return await replayed(gateway, view, ResponseEvents(view.job, record, logprobs))


async def replayed(gateway: Gateway, view: JobView, events: ResponseEvents) -> dict[str, Any]:
    """The response of a job that has ended, as `events` shows it."""
    await replay(gateway, view, events.of)
    response: dict[str, Any] = events.end(view)[-1]["response"]
    return response


async def shown_response(gateway: Gateway, response_id: str, tenant: str) -> dict[str, Any]:
    """Returns the response as it is now, with output once it has ended. Raises ApiError (404)."""
    view, record = await read_response(gateway, response_id, tenant)
    if view.is_terminal:
        return await ended_response(gateway, view, record)
    return ResponseEvents(view.job, record).response(STATUSES[view.status])
