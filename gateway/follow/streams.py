"""Streams of a job's log: for a synchronous call, or of the job itself (resumable)."""

from collections.abc import AsyncGenerator

from contract.errors import BatchwayError
from contract.events import End, LogEntry
from contract.function_types import JobView
from contract.jobs import Endpoint, Job, JobStatus
from contract.response_events import ResponseEvents
from contract.response_records import decode_record
from gateway.follow.answers import Chunks
from gateway.follow.event_ids import START, LogPosition
from gateway.follow.follow import Ended, follow
from gateway.follow.job_objects import events_url, job_object, place
from gateway.follow.logprobs import response_logprobs
from gateway.follow.sync_call import SyncCall
from gateway.http import sse
from gateway.http.errors import (
    ApiError,
    Draining,
    became_job,
    failure_of,
    to_call_error,
)
from gateway.redis.cursor import Idle, Reset
from gateway.state import Gateway

_RESET = sse.message({"from": 0}, event="stream_reset")


def reset_error() -> ApiError:
    message = "the queue lost the end of this answer after it was sent: start again"
    return ApiError(500, "stream_reset", message)


async def call_stream(
    gateway: Gateway,
    call: SyncCall,
    *,
    includes_usage: bool,
    repeats_usage: bool,
    has_ids: bool,
    position: LogPosition = START,
    starts_over: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The events of a synchronous call, from a position on.

    Raises BatchwayError and AnsweredOtherwise before the first event; later errors are events.
    `has_ids`: events have ids, because the caller may resume. A caller that gave a position gets a
    `stream_reset` event if the job starts over; for others, a replaced log is an error.
    """
    job = call.job
    may_reset = position is not START
    if may_reset:
        gateway.metrics.note_resumed()
    if starts_over:
        yield _RESET
        position = START
    tokenizer = await gateway.tokenizer_for(job)
    chunks = Chunks(job, tokenizer, includes_usage=includes_usage, repeats_usage=repeats_usage)
    if includes_usage or job.needs_tokenizer:
        await _prime(gateway, chunks, job, position.number)
    heartbeat = sse.Heartbeat(gateway.settings.heartbeat_s)
    has_sent, last_id = starts_over, position.sse_id
    may_begin_early = not call.patience.is_wished
    try:
        async for item in follow(gateway, job, position, call=call):
            match item:
                case Ended(end):
                    failure = failure_of(end)
                    if failure is not None:
                        raise failure
                    if includes_usage:
                        yield sse.message(chunks.usage(end.prompt_tokens, end.output_tokens))
                    break
                case LogEntry():
                    if messages := _chunk_messages(chunks, item, has_id=has_ids):
                        yield messages
                        has_sent, last_id = True, item.sse_id
                        heartbeat.touch()
                case Reset() if may_reset:
                    chunks.reset()
                    yield _RESET
                    has_sent = True
                case Reset() if has_sent:
                    raise reset_error()
                case Idle() if heartbeat.is_due() and (has_sent or may_begin_early):
                    yield sse.COMMENT if has_ids else sse.EMPTY_LINE
                    has_sent = True
            if call.patience.is_over(has_sent=has_sent):
                if not has_sent:
                    raise await call.hand_over()
                await call.detach()
                yield _became_job(job, last_id)
                break
    except BatchwayError as exc:
        error = to_call_error(exc)
        if not has_sent:
            raise error from exc
        yield sse.message(error.body())
    yield sse.DONE


def _became_job(job: Job, last_id: str) -> bytes:
    """The event that says where to resume, for callers that know it; else an error."""
    error = became_job(job.id, events_url(job.id), last_id)
    where = {"id": job.id, "last_event_id": last_id, "events_url": events_url(job.id)}
    return sse.message({**where, **error.body()}, event="reconnect")


async def job_stream(
    gateway: Gateway, view: JobView, position: LogPosition
) -> AsyncGenerator[bytes, None]:
    """The events of `GET /v1/jobs/{id}/events`, from a position on."""
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
    queue_news = _QueueNews()
    if position is not START:
        gateway.metrics.note_resumed()
    yield queue_news.of(view) or sse.COMMENT
    if begun and position is START:
        yield begun
    try:
        async for item in follow(gateway, job, position):
            match item:
                case Ended(end, sse_id):
                    ended, _ = await gateway.broker.read(job.id, job.tenant)
                    if isinstance(chunks, ResponseEvents):
                        yield b"".join(map(sse.message, chunks.end(ended)))
                    yield sse.message(job_object(ended).model_dump(), event=end.status, id_=sse_id)
                    break
                case LogEntry():
                    if messages := _chunk_messages(chunks, item, has_id=True):
                        yield messages
                        last_id = item.sse_id
                        heartbeat.touch()
                case Reset():
                    chunks.reset()
                    yield _RESET + _begun(chunks)
                case Idle(view=read):
                    if read is not None and (news := queue_news.of(read)):
                        yield news
                        heartbeat.touch()
                    elif heartbeat.is_due():
                        yield sse.COMMENT
    except Draining:
        yield sse.message({"id": job.id, "last_event_id": last_id}, event="reconnect")
    else:
        yield sse.DONE


def _begun(chunks: Chunks | ResponseEvents) -> bytes:
    """The events of a response that precede its first output."""
    events = chunks.begin() if isinstance(chunks, ResponseEvents) else ()
    return b"".join(map(sse.message, events))


async def _prime(gateway: Gateway, chunks: Chunks | ResponseEvents, job: Job, after: int) -> None:
    """Replays earlier events: text offsets, token counts and a response's numbers depend on
    them."""
    async for entry in gateway.broker.log(job.id, job.tenant, up_to=after):
        if not isinstance(entry.event, End):
            chunks.of(entry)


def _chunk_messages(chunks: Chunks | ResponseEvents, entry: LogEntry, *, has_id: bool) -> bytes:
    """Encodes chunks. Only the last has the id, so a client that resumes there has them all. Empty
    if the event shows nothing."""
    if not (messages := chunks.of(entry)):
        return b""
    *heads, last = messages
    return b"".join(map(sse.message, heads)) + sse.message(
        last, id_=entry.sse_id if has_id else None
    )


class _QueueNews:
    """The `queued` events of one stream: one for each change of the position or the ETA
    (seconds)."""

    def __init__(self) -> None:
        self._told: object = None

    def of(self, view: JobView) -> bytes:
        """Returns a `queued` event; empty if nothing has changed."""
        if view.status is not JobStatus.QUEUED:
            return b""
        shown = place(view.position)
        news = (shown["position"], shown["eta_s"] and round(shown["eta_s"]))
        if news == self._told:
            return b""
        self._told = news
        return sse.message({"id": view.job.id, "status": "queued", **shown}, event="queued")
