"""Follows the job of a response: to its end, or as a stream of events."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from contract.errors import BatchwayError
from contract.events import LogEntry
from contract.jobs import Job
from contract.response_events import Event, ResponseEvents, ResponseRecord, response_id
from gateway.follow.answers import response_logprobs
from gateway.follow.streams import Ended, follow, reset_error
from gateway.follow.sync_call import SyncCall
from gateway.http import sse
from gateway.http.errors import ApiError, failure_of, to_call_error
from gateway.redis.hints import Reset
from gateway.state import Gateway


async def whole_response(call: SyncCall, record: ResponseRecord) -> dict[str, Any]:
    """Returns the response of a call once its job has ended, or as it is at the platform's time
    limit. Raises ApiError if the job failed."""
    gateway, job = call.gateway, call.job
    events = ResponseEvents(job, record, response_logprobs(await gateway.tokenizer_for(job)))
    async for item in follow(gateway, job, call=call):
        match item:
            case Ended(end):
                if (failure := failure_of(end)) is not None:
                    raise failure
                view, _ = await gateway.broker.read(job.id, job.tenant)
                response: dict[str, Any] = events.end(view)[-1]["response"]
                return response
            case LogEntry():
                events.of(item)
            case Reset():
                events.reset()
        if call.patience.is_over(has_sent=False):
            await _outlive(call, record)
            return events.response("in_progress")
    raise AssertionError("unreachable")


async def response_stream(
    gateway: Gateway, job: Job, record: ResponseRecord, *, after: int, call: SyncCall | None = None
) -> AsyncGenerator[bytes, None]:
    """The events with sequence numbers over `after`. `call`: the call that waits for them; the
    platform may limit its time."""
    events = ResponseEvents(job, record, response_logprobs(await gateway.tokenizer_for(job)))
    heartbeat = sse.Heartbeat(gateway.settings.heartbeat_s)
    yield _messages(events.begin(), after) or sse.EMPTY_LINE
    num_at_start = events.num_events
    try:
        async for item in follow(gateway, job, call=call):
            match item:
                case Ended():
                    view, _ = await gateway.broker.read(job.id, job.tenant)
                    yield _messages(events.end(view), after)
                    break
                case LogEntry():
                    if messages := _messages(events.of(item), after):
                        yield messages
                        heartbeat.touch()
                case Reset() if events.num_events > num_at_start:
                    raise reset_error()
                case Reset():
                    events.reset()
                    events.begin()
            if heartbeat.is_due():
                yield sse.EMPTY_LINE
            if call is not None and call.patience.is_over(has_sent=True):
                await _outlive(call, record)
                raise _time_is_up(job, events.num_events)
    except BatchwayError as exc:
        error = to_call_error(exc)
        yield _messages([events.error(error.code, error.message)], -1)
    yield sse.DONE


async def _outlive(call: SyncCall, record: ResponseRecord) -> None:
    """The platform's time is up: a stored response goes on. Raises ApiError for others."""
    if not record.is_stored:
        await call.on_gone()
        message = "the time for this answer is up; with store: true it would go on"
        raise ApiError(504, "deadline_exceeded", message, headers={"x-should-retry": "false"})
    await call.detach()


def _time_is_up(job: Job, num_events: int) -> ApiError:
    path = f"/v1/responses/{response_id(job)}?stream=true&starting_after={num_events - 1}"
    message = f"the time for this stream is up; the response goes on: read the rest at {path}"
    return ApiError(503, "became_job", message)


def _messages(events: Sequence[Event], after: int) -> bytes:
    shown = [event for event in events if event["sequence_number"] > after]
    return b"".join(sse.message(event, event=event["type"]) for event in shown)
