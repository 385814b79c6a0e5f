"""Follows what becomes of a job, from a position in its log to the end: as a whole answer, or as a
stream of events.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from contract.answers import Answer, Chunks, response_logprobs
from contract.errors import BatchwayError
from contract.events import End, LogEntry, Members, Tokens
from contract.function_types import JobView
from contract.jobs import Endpoint, Job, JobStatus
from contract.response_events import (
    Event,
    ResponseEvents,
    ResponseRecord,
    decode_record,
    response_id,
)
from contract.vector_answers import VectorAnswer
from gateway.follow.job_objects import events_url, job_object, place, worker_wait_fields
from gateway.follow.message_events import MessageEvents
from gateway.follow.stored_responses import ended_response, record_of_job, replay
from gateway.follow.sync_call import START, LogPosition, SyncCall, TimeLimit
from gateway.http import sse
from gateway.http.errors import NO_RETRY, ApiError, Draining, failure_of, to_call_error
from gateway.redis.broker import Broker
from gateway.redis.hints import Idle, News, Reset
from gateway.state import Gateway

log = logging.getLogger("batchway.gateway")

_Shown = Chunks | MessageEvents | ResponseEvents
_RESET = sse.message({"from": 0}, event="stream_reset")


async def follow(
    gateway: Gateway,
    job: Job,
    position: LogPosition = START,
    *,
    call: SyncCall | None = None,
    submitted_s: float | None = None,
    ends_with_drain: bool = True,
) -> AsyncIterator[News]:
    """Yields events as they are logged, those together that came at once, and the End by itself;
    Reset where the log was replaced, Idle while nothing comes. Nothing if the position is that of
    the end.

    `call`, which waits for the answer, is told the first token and the models that a flow calls.
    `submitted_s`: as for Broker.events; that of the call by default. Raises Draining when the
    gateway has no more time, unless `ends_with_drain` is false, and what Broker.events raises.
    """
    if call is not None:
        submitted_s = call.submitted_s
    events = gateway.broker.events(job, position.number, position.hash, submitted_s=submitted_s)
    async for news in events:
        match news:
            case LogEntry(event=End() as end):
                if call is not None:
                    _log_answered(job, end)
                yield news
                return
            case [*entries] if call is not None:
                _note(call, entries)
            case Reset() if call is not None and call.deltas:
                call.deltas.clear()
        yield news
        if ends_with_drain and gateway.drain.is_over:
            raise Draining


def _note(call: SyncCall, entries: Sequence[LogEntry]) -> None:
    for entry in entries:
        if isinstance(entry.event, Members):
            call.note_members(entry.event)
        else:
            call.timing.mark("first_token")
            if call.deltas is not None and isinstance(entry.event, Tokens):
                call.deltas += entry.event.deltas


def _log_answered(job: Job, end: End) -> None:
    """Logs a synchronous call at its end. Before its first token, logging would delay it."""
    log.info(
        "answered job_id=%s lane=%s status=%s num_prompt=%d num_output=%d",
        job.id,
        job.lane,
        end.status,
        end.prompt_tokens,
        end.output_tokens,
    )


async def whole_answer(call: SyncCall, message: MessageEvents | None = None) -> dict[str, Any]:
    """The response of a call, once its job has ended: `message`, or OpenAI's. Raises ApiError if
    the job failed, and AnsweredOtherwise if the call became a job."""
    answer = message or await answer_to(call.gateway, call.job)
    end = await _collected(call, answer)
    if end is None:
        raise await call.hand_over()
    return await built(answer, end.prompt_tokens, end.output_tokens, end.cached_tokens)


async def _collected(
    call: SyncCall, answer: Answer | MessageEvents | ResponseEvents | VectorAnswer
) -> End | None:
    """Adds a call's log to its answer. Returns the end, None if the call's time is up before.
    Raises ApiError if the job failed."""
    async for news in follow(call.gateway, call.job, call=call):
        match news:
            case LogEntry(event=End() as end):
                if (failure := failure_of(end)) is not None:
                    raise failure
                return end
            case [*entries]:
                for entry in entries:
                    answer.add(entry)
            case Reset():
                answer.reset()
        if call.time_limit.is_over(has_sent=False):
            return None
    raise AssertionError("unreachable")


async def ended_answer(gateway: Gateway, view: JobView) -> dict[str, Any]:
    """The response of a job that has ended, from its log. Raises BatchwayError."""
    if record := await record_of_job(gateway, view.job):
        return await ended_response(gateway, view, record)
    answer = await answer_to(gateway, await gateway.whole(view.job))
    await replay(gateway, view, answer.add)
    num_tokens = view.num_prompt_tokens, view.num_output_tokens, view.num_cached_tokens
    return await built(answer, *num_tokens)


async def answer_to(gateway: Gateway, job: Job) -> Answer | VectorAnswer:
    """The response to a job, to which its events must be added."""
    if job.pooling is None:
        return Answer(job, await gateway.tokenizer_for(job))
    card = (await gateway.broker.known.models()).get(job.model)
    labels = () if card is None or card.pooling is None else card.pooling.labels
    return VectorAnswer(job, labels)


async def built(
    answer: Answer | MessageEvents | VectorAnswer,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached: int,
) -> dict[str, Any]:
    """The whole response; with vectors in a thread, because there may be millions of numbers."""
    if isinstance(answer, VectorAnswer):
        return await asyncio.to_thread(answer.build, num_prompt_tokens, num_output_tokens)
    return answer.build(num_prompt_tokens, num_output_tokens, num_cached)


def reset_error() -> ApiError:
    message = "the queue lost the end of this answer after it was sent: start again"
    return ApiError(500, "stream_reset", message)


async def call_stream(
    call: SyncCall, chunks: Chunks | MessageEvents, *, has_ids: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a synchronous call, from its position on.

    Raises BatchwayError and AnsweredOtherwise before the first event; later errors are events.
    `has_ids`: events have ids, because the caller may resume. A caller that gave a position gets a
    `stream_reset` event if the job starts over; for others, a replaced log is an error.
    """
    gateway, job, position = call.gateway, call.job, call.position
    may_reset = position is not START
    starts_over = may_reset and call.submitted_s is not None
    if may_reset:
        gateway.metrics.note_resumed()
    if starts_over:
        yield _RESET
        position = START
    if chunks.needs_history:
        await _prime(gateway, chunks, job, position.number)
    heartbeat = sse.Heartbeat(gateway.settings.heartbeat_s)
    has_sent, last_id = starts_over, position.sse_id
    may_begin_early = call.time_limit.wait_s is None
    try:
        async for news in follow(gateway, job, position, call=call):
            match news:
                case LogEntry(event=End() as end):
                    if (failure := failure_of(end)) is not None:
                        raise failure
                    num_tokens = end.prompt_tokens, end.output_tokens, end.cached_tokens
                    if last := chunks.end(*num_tokens):
                        yield _encoded(chunks, last)
                    break
                case [*entries]:
                    if messages := _chunk_messages(chunks, entries, has_ids=has_ids):
                        yield messages
                        has_sent, last_id = True, entries[-1].sse_id
                        heartbeat.touch()
                case Reset() if may_reset:
                    chunks.reset()
                    yield _RESET
                    has_sent = True
                case Reset() if has_sent:
                    raise reset_error()
                case Idle() if heartbeat.is_due() and (has_sent or may_begin_early):
                    yield _idle(chunks, has_ids=has_ids)
                    has_sent = True
            if call.time_limit.is_over(has_sent=has_sent):
                if not has_sent:
                    raise await call.hand_over()
                await call.detach()
                yield _became_job(call, chunks, last_id)
                break
    except BatchwayError as exc:
        error = to_call_error(exc)
        if not has_sent:
            raise error from exc
        yield sse.failure(error, call.request.scope)
    else:
        if isinstance(chunks, Chunks):
            yield sse.DONE


def _encoded(shown: _Shown, chunks: Sequence[Event], id_: str | None = None) -> bytes:
    """Only Anthropic's events are named. Only the last one has the id."""
    is_named = isinstance(shown, MessageEvents)
    ids = [*[None] * (len(chunks) - 1), id_]
    return b"".join(
        sse.message(chunk, event=chunk["type"] if is_named else None, id_=own)
        for chunk, own in zip(chunks, ids, strict=False)
    )


def _idle(chunks: Chunks | MessageEvents, *, has_ids: bool) -> bytes:
    if isinstance(chunks, MessageEvents):
        return _encoded(chunks, chunks.idle())
    return sse.COMMENT if has_ids else sse.EMPTY_LINE


def _became_job(call: SyncCall, chunks: Chunks | MessageEvents, last_id: str) -> bytes:
    """The event that says where to resume, for callers that know it; else an error."""
    job = call.job
    url = events_url(job.id)
    message = (
        f"the time for this answer is up; it goes on as the job {job.id}: read the rest at "
        f"{url}?starting_after={last_id}"
    )
    error = ApiError(503, "became_job", message)
    where = {"id": job.id, "last_event_id": last_id, "events_url": url}
    event = "error" if isinstance(chunks, MessageEvents) else "reconnect"
    return sse.message({**where, **error.body_for(call.request.scope)}, event=event)


async def job_stream(
    gateway: Gateway, view: JobView, position: LogPosition, time_limit: TimeLimit
) -> AsyncGenerator[bytes, None]:
    """The events of `GET /v1/jobs/{id}/events`, from a position on, within the platform's limit."""
    job = await gateway.whole(view.job)
    tokenizer = await gateway.tokenizer_for(job)
    chunks: Chunks | ResponseEvents = Chunks(job, tokenizer)
    if job.endpoint is Endpoint.RESPONSES:
        record = decode_record(await gateway.broker.payloads.response(job))
        chunks = ResponseEvents(job, record, response_logprobs(tokenizer))
    begun = _begun(chunks)
    if begun or job.needs_tokenizer:
        await _prime(gateway, chunks, job, position.number)
    heartbeat = sse.Heartbeat(gateway.settings.heartbeat_s)
    last_id = position.sse_id
    queue_news = _QueueNews(gateway.broker)
    if position is not START:
        gateway.metrics.note_resumed()
    yield await queue_news.of(view) or sse.COMMENT
    if begun and position is START:
        yield begun
    try:
        async for news in follow(gateway, job, position):
            match news:
                case LogEntry(event=End() as end):
                    ended, _ = await gateway.broker.read(job.id, job.tenant)
                    if isinstance(chunks, ResponseEvents):
                        yield b"".join(map(sse.message, chunks.end(ended)))
                    yield sse.message(
                        job_object(ended).model_dump(), event=end.status, id_=news.sse_id
                    )
                    break
                case [*entries]:
                    if messages := _chunk_messages(chunks, entries, has_ids=True):
                        yield messages
                        last_id = entries[-1].sse_id
                        heartbeat.touch()
                case Reset():
                    chunks.reset()
                    yield _RESET + _begun(chunks)
                case Idle(view=read):
                    if read is not None and (queued := await queue_news.of(read)):
                        yield queued
                        heartbeat.touch()
                    elif heartbeat.is_due():
                        yield sse.COMMENT
            if time_limit.is_over(has_sent=True):
                raise Draining
    except Draining:
        yield sse.message({"id": job.id, "last_event_id": last_id}, event="reconnect")
    else:
        yield sse.DONE


def _begun(chunks: Chunks | ResponseEvents) -> bytes:
    """The events of a response that precede its first output."""
    events = chunks.begin() if isinstance(chunks, ResponseEvents) else ()
    return b"".join(map(sse.message, events))


async def _prime(gateway: Gateway, chunks: _Shown, job: Job, after: int) -> None:
    """Replays earlier events: text offsets, token counts and a response's numbers depend on
    them."""
    async for entry in gateway.broker.log(job.id, job.tenant, up_to=after):
        if not isinstance(entry.event, End):
            chunks.of(entry)


def _chunk_messages(chunks: _Shown, entries: Sequence[LogEntry], *, has_ids: bool) -> bytes:
    """Encodes the chunks of events. Only the last of each has its id, so a client that resumes
    there has them all. Empty if the events show nothing."""
    encoded = list[bytes]()
    for entry in entries:
        encoded.append(_encoded(chunks, chunks.of(entry), entry.sse_id if has_ids else None))
    return b"".join(encoded)


class _QueueNews:
    """The `queued` events of one stream: one for each change of the position, the ETA (seconds) or
    the wait for a worker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._told: object = None

    async def of(self, view: JobView) -> bytes:
        """Returns a `queued` event; empty if nothing has changed."""
        if view.status is not JobStatus.QUEUED:
            return b""
        wait = await self._broker.worker_wait(view.job, view.status)
        shown = place(view.position) | worker_wait_fields(wait)
        news = (shown["position"], shown["eta_s"] and round(shown["eta_s"]), wait is None)
        if news == self._told:
            return b""
        self._told = news
        return sse.message({"id": view.job.id, "status": "queued", **shown}, event="queued")


async def whole_response(call: SyncCall, record: ResponseRecord) -> dict[str, Any]:
    """Returns the response of a call once its job has ended, or as it is at the platform's time
    limit. Raises ApiError if the job failed."""
    gateway, job = call.gateway, call.job
    events = ResponseEvents(job, record, response_logprobs(await gateway.tokenizer_for(job)))
    if await _collected(call, events) is None:
        await _outlive(call, record)
        return events.response("in_progress")
    view, _ = await gateway.broker.read(job.id, job.tenant)
    response: dict[str, Any] = events.end(view)[-1]["response"]
    return response


async def response_stream(
    gateway: Gateway,
    job: Job,
    record: ResponseRecord,
    *,
    after: int,
    time_limit: TimeLimit,
    call: SyncCall | None = None,
) -> AsyncGenerator[bytes, None]:
    """The events with sequence numbers over `after`. `time_limit`: the platform may limit the time.
    `call`: the call that waits for them."""
    events = ResponseEvents(job, record, response_logprobs(await gateway.tokenizer_for(job)))
    heartbeat = sse.Heartbeat(gateway.settings.heartbeat_s)
    yield _messages(events.begin(), after) or sse.EMPTY_LINE
    num_at_start = events.num_events
    try:
        async for news in follow(gateway, job, call=call):
            match news:
                case LogEntry(event=End()):
                    view, _ = await gateway.broker.read(job.id, job.tenant)
                    yield _messages(events.end(view), after)
                    break
                case [*entries]:
                    shown = [event for entry in entries for event in events.of(entry)]
                    if messages := _messages(shown, after):
                        yield messages
                        heartbeat.touch()
                case Reset() if events.num_events > num_at_start:
                    raise reset_error()
                case Reset():
                    events.reset()
                    events.begin()
            if heartbeat.is_due():
                yield sse.EMPTY_LINE
            if time_limit.is_over(has_sent=True):
                if call is not None:
                    await _outlive(call, record)
                raise _time_is_up(job, events.num_events)
    except BatchwayError as exc:
        error = to_call_error(exc)
        yield _messages([events.error(error.body())], -1)
    yield sse.DONE


async def _outlive(call: SyncCall, record: ResponseRecord) -> None:
    """The platform's time is up: a stored response goes on. Raises ApiError for others."""
    if not record.is_stored:
        await call.on_gone()
        message = "the time for this answer is up; with store: true it would go on"
        raise ApiError(504, "deadline_exceeded", message, headers=NO_RETRY)
    await call.detach()


def _time_is_up(job: Job, num_events: int) -> ApiError:
    path = f"/v1/responses/{response_id(job)}?stream=true&starting_after={num_events - 1}"
    message = f"the time for this stream is up; the response goes on: read the rest at {path}"
    return ApiError(503, "became_job", message)


def _messages(events: Sequence[Event], after: int) -> bytes:
    shown = [event for event in events if event["sequence_number"] > after]
    return b"".join(sse.message(event, event=event["type"]) for event in shown)
