"""Makes messages of jobs' events, attempts to deliver them, and records the outcomes."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any, Literal

import msgspec
import tokenizers
from cachetools import LRUCache

from contract.answers import Answer, response_logprobs
from contract.callback_urls import AllowList
from contract.callbacks import Callback, CallbackKind, MessageKind, Secrets, is_open_target
from contract.catalogue import Catalogue
from contract.connection import end_tasks
from contract.consumer import keep_leases
from contract.errors import BrokerUnavailable, CommandDenied, WireError
from contract.events import LogEntry, Tokens
from contract.function_types import JobView
from contract.functions import Functions
from contract.jobs import Endpoint, Job, JobStatus, ObjectRef
from contract.outbox import Outbox, OutboxRecord, Taken
from contract.payloads.encoding import decode_log, with_prompts
from contract.payloads.store import ObjectStore, PayloadLost, PayloadUnavailable
from contract.response_events import ResponseEvents, decode_record
from contract.telemetry.tracing import Tracing, parent_of, traceparent_of
from contract.token_texts import TokenTexts
from contract.vector_answers import VectorAnswer, num_vector_bytes
from workers.callbacks.destinations import MAX_BYTES, AwsSender
from workers.callbacks.retries import (
    MAX_PROGRESS_FAILURES,
    RETRY_DELAYS_S,
    Delivered,
    DeliveryFailed,
    DeliveryRefused,
    Outcome,
    next_delay_s,
)
from workers.callbacks.webhook import WebhookSender, signed_headers

Output = dict[str, Any]  # fields of the message, beside the job's state


def encode(record: OutboxRecord, *, public_url: str, output: Output | None = None) -> bytes:
    """Encodes the message; every attempt gives the same bytes. Without `output` the receiver must
    fetch it."""
    if record.job_id.startswith("batch_"):
        return _of_batch(record)
    path = f"/v1/jobs/{record.job_id}"
    data: dict[str, Any] = {
        "id": record.job_id,
        "object": "job",
        "status": record.kind.value if record.kind.is_end else "running",
        "model": record.model,
        "lane": record.lane,
        "usage": {
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_output_tokens,
            "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": record.num_cached_tokens},
        },
        "created_at": record.created_ms / 1000,
        "error": {"code": record.code, "message": record.message} if record.code else None,
        "result_url": f"{public_url}{path}",
    }
    if record.kind.is_end:
        data["finished_at"] = record.at_ms / 1000
    data |= output or {}
    body = {
        "type": record.kind.event_type,
        "timestamp": datetime.fromtimestamp(record.at_ms / 1000, UTC).isoformat(),
        "data": data,
    }
    return _json(body)


def _of_batch(record: OutboxRecord) -> bytes:
    """OpenAI's event of a batch's end."""
    status = "completed" if record.kind is MessageKind.SUCCEEDED else record.kind.value
    body = {
        "id": f"evt_{record.message_id}",
        "object": "event",
        "type": f"batch.{status}",
        "created_at": record.at_ms // 1000,
        "data": {"id": record.job_id},
    }
    return _json(body)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def response_of(
    view: JobView, request: bytes, entries: Iterable[LogEntry], texts: TokenTexts | None
) -> Output:
    """The whole response of a job of /v1/responses. Raises WireError."""
    events = ResponseEvents(view.job, decode_record(request), response_logprobs(texts))
    for entry in entries:
        events.of(entry)
    return {"response": events.end(view)[-1]["response"]}


def whole(answer: Answer | VectorAnswer, view: JobView, entries: Iterable[LogEntry]) -> Output:
    """The answer of a job that has ended."""
    for entry in entries:
        answer.add(entry)
    return answer.build(view.num_prompt_tokens, view.num_output_tokens, view.num_cached_tokens)


_SHOWN = ("choices", "prompt_logprobs", "prompt_token_ids")  # of chats and completions
_LEAST_BYTES = 8  # of a token with its log probability


def num_logprobs(entries: Iterable[LogEntry]) -> int:
    """The number of tokens that are named with their log probabilities."""
    events = [entry.event for entry in entries]
    parts = [part for e in events for part in (e.deltas if isinstance(e, Tokens) else [e])]
    return sum(1 + len(i.top) for part in parts for i in getattr(part, "logprobs", None) or ())


log = logging.getLogger("batchway.callbacks")

SERVICE = "batchway-callbacks"
_PAGE_EVENTS = 500
_DONE_TRIES = 5  # to record an outcome; then the lease expires
MIN_KEY_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings:
    """Settings of one process of `batchway callbacks`. Times are in seconds.

    Raises ValueError if the key is too short.
    """

    redis_url: str = field(repr=False)
    key: str = field(repr=False)  # signs RQ jobs; the same in all processes of a namespace
    namespace: str = "default"
    secrets: Secrets = field(default_factory=Secrets, repr=False)  # by tenant
    allow: AllowList = field(default_factory=AllowList)  # for development only
    aws_targets: tuple[str, ...] = ()  # patterns of AWS targets that callbacks may reach
    public_url: str = ""  # prefix of result URLs; "": a path alone is sent
    object_store: str = ""  # a directory or s3://…; "": none
    max_concurrent: int = 32  # attempts at a time in this process
    max_per_target: int = 8  # attempts at a time to one destination, over all processes
    timeout_s: float = 15.0  # of an attempt, from name lookup to the end of the answer
    lease_s: float = 5.0  # an attempt whose lease is not renewed for so long is made again
    poll_s: float = 0.2  # interval of polling the outbox
    retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S
    drain_s: float = 20.0  # on SIGTERM, how long running attempts may continue

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_CHARS:
            raise ValueError(f"BATCHWAY_CALLBACK_KEY must have at least {MIN_KEY_CHARS} characters")


@dataclass(eq=False)
class Deliverer:
    """Makes attempts for the messages of a partition, many at a time, on one event loop."""

    _settings: CallbackSettings
    _outbox: Outbox
    _functions: Functions
    _catalogue: Catalogue
    _webhooks: WebhookSender
    _aws: AwsSender
    _store: ObjectStore | None
    _random: Random
    _tracing: Tracing
    _tokenizers: LRUCache[str, TokenTexts]

    async def attempt(self, taken: Taken) -> None:
        """Makes one attempt and records its outcome. If sending the message raises, the attempt has
        failed and is retried. Raises CommandDenied."""
        try:
            try:
                record = await self._outbox.start(taken, lease_s=self._settings.lease_s)
            except WireError:
                await self._note(taken, None, DeliveryRefused("its record is unreadable"))
                return
            if record is None:
                return  # another process has leased the message
            async with self._renewing(taken):
                outcome = await self._outcome(record, taken)
            await self._note(taken, record, outcome)
        except BrokerUnavailable as exc:  # the lease expires and another attempt is made
            log.warning("attempt given up (%s) job_id=%s", type(exc).__name__, taken.job_id)

    async def _outcome(self, record: OutboxRecord, taken: Taken) -> Outcome:
        try:
            return await self._traced(record, taken)
        except (BrokerUnavailable, CommandDenied):
            raise
        except Exception as exc:  # a URL, a log or a library may raise anything
            return DeliveryFailed(f"it could not be sent ({type(exc).__name__})")

    @contextlib.asynccontextmanager
    async def _renewing(self, taken: Taken) -> AsyncIterator[None]:
        lease_s = self._settings.lease_s
        renew = partial(self._outbox.renew, taken, lease_s=lease_s)
        task = asyncio.create_task(keep_leases(renew, every_s=lease_s / 3))
        try:
            yield
        finally:
            await end_tasks(task)

    async def _traced(self, record: OutboxRecord, taken: Taken) -> Outcome:
        """Makes one attempt and records it as a span of the job's trace."""
        callback, tracer = record.callback, self._tracing.tracer
        if tracer is None or callback is None or not callback.traceparent:
            return await self._deliver(record)
        from opentelemetry.trace import SpanKind, StatusCode

        attributes: dict[str, str | int] = {
            "batchway.job_id": record.job_id,
            "batchway.callback.kind": callback.kind,
            "batchway.callback.event": record.kind.event_type,
            "batchway.callback.attempt": taken.attempt,
        }
        parent = parent_of(callback.traceparent)
        with tracer.start_as_current_span(
            "callback", parent, SpanKind.PRODUCER, attributes, record_exception=False
        ) as span:
            outcome = await self._deliver(record, traceparent_of(span))
            if not isinstance(outcome, Delivered):
                span.set_status(StatusCode.ERROR)
            return outcome

    async def _deliver(self, record: OutboxRecord, traceparent: str = "") -> Outcome:
        callback = record.callback
        if callback is None:
            return DeliveryRefused("the record holds no callback")
        secrets = self._settings.secrets.signing(callback, record.tenant)
        if callback.kind is CallbackKind.URL and not secrets:  # an operator may add one
            return DeliveryFailed("no secret signs it, also none of BATCHWAY_CALLBACK_SECRETS")
        try:
            body = await self._body(record, callback)
        except PayloadUnavailable:
            return DeliveryFailed("the object store does not answer")
        headers = signed_headers(record.message_id, int(time.time()), body, secrets)
        if callback.kind is CallbackKind.URL:
            headers |= {"traceparent": traceparent} if traceparent else {}
            return await self._webhooks.send(callback.target, body, headers)
        if not is_open_target(callback, self._settings.aws_targets):
            return DeliveryRefused("BATCHWAY_CALLBACK_AWS does not name this target")
        return await self._aws.send(callback, record.kind.event_type, body, headers)

    async def _body(self, record: OutboxRecord, callback: Callback) -> bytes:
        thin = encode(record, public_url=self._settings.public_url)
        if not callback.is_full or not record.kind.is_end:
            return thin
        output = None
        with contextlib.suppress(PayloadLost):
            output = await self._output(record)
        if output is None:
            return thin
        full = encode(record, public_url=self._settings.public_url, output=output)
        return full if len(full) <= MAX_BYTES else thin

    async def _output(self, record: OutboxRecord) -> Output | None:
        """The job's choices, response or vectors; None if they are not stored as a whole, or are
        too long. Raises PayloadError."""
        found = await self._log(record)
        if found is None:
            return None
        view, entries = found
        job = view.job
        if job.pooling is not None:
            return await self._vectors(view, entries)
        if num_logprobs(entries) * _LEAST_BYTES > MAX_BYTES:
            return None
        texts = await self._texts_for(job)
        if job.endpoint is not Endpoint.RESPONSES:
            if job.stored_prompt is not None and (job.return_token_ids or job.needs_tokenizer):
                job = with_prompts(job, await self._object(job.stored_prompt.ref))
            built = await asyncio.to_thread(whole, Answer(job, texts), view, entries)
            return {name: built[name] for name in _SHOWN if name in built}
        request = job.response
        if job.stored_response is not None:
            request = await self._object(job.stored_response)
        return response_of(view, request, entries, texts)

    async def _object(self, ref: ObjectRef) -> bytes:
        """Raises PayloadError."""
        if self._store is None:
            raise PayloadLost("there is no object store")
        return await asyncio.to_thread(self._store.get, ref)

    async def _texts_for(self, job: Job) -> TokenTexts | None:
        """None if the answer shows none. Raises PayloadLost if they cannot be read."""
        if not job.needs_tokenizer:
            return None
        try:
            card = await self._catalogue.model(job.model)
            sha256 = "" if card is None else card.tokenizer_sha256
            if sha256 not in self._tokenizers:
                files = await self._catalogue.tokenizer(sha256)
                texts = await asyncio.to_thread(TokenTexts, files.tokenizer_json, tokenizers)
                self._tokenizers[sha256] = texts
        except (WireError, ValueError) as exc:
            raise PayloadLost("the tokenizer cannot be read") from exc
        return self._tokenizers[sha256]

    async def _vectors(self, view: JobView, entries: Sequence[LogEntry]) -> Output | None:
        if view.status is not JobStatus.SUCCEEDED or num_vector_bytes(entries) > MAX_BYTES:
            return None
        card = await self._catalogue.model(view.job.model)
        labels = () if card is None or card.pooling is None else card.pooling.labels
        built = whole(VectorAnswer(view.job, labels), view, entries)
        # Parts of it are encoded already.
        return {"result": msgspec.json.decode(msgspec.json.encode(built))}

    async def _log(self, record: OutboxRecord) -> tuple[JobView, Sequence[LogEntry]] | None:
        """The job with its log; None if that is not stored as a whole. Raises PayloadError."""
        entries: list[LogEntry] = []
        number = 0
        while True:
            found = await self._functions.read(
                record.job_id, record.tenant, after=number, max_events=_PAGE_EVENTS
            )
            if found is None:
                return None
            view, page = found
            if view.result is not None:
                return view, decode_log(await self._object(view.result))
            entries += page
            if view.ends_with(page):
                break
            number = page[-1].number
        # A Redis that has lost writes since may have a shorter log, which the job will complete.
        is_whole = view.is_terminal and len(entries) == view.next_number - 1
        return (view, entries) if is_whole else None

    async def _note(self, taken: Taken, record: OutboxRecord | None, outcome: Outcome) -> None:
        delay_s = None if record is None else self._delay_s(record, outcome)
        state: Literal["delivered", "retry", "dead"] = "dead" if delay_s is None else "retry"
        if isinstance(outcome, Delivered):
            state = "delivered"
        for _ in range(_DONE_TRIES):
            try:
                await self._outbox.done(taken, state, delay_s=delay_s or 0.0, note=outcome.note)
                break
            except BrokerUnavailable:
                await asyncio.sleep(self._settings.lease_s / _DONE_TRIES)
        log.log(
            logging.WARNING if state == "dead" else logging.INFO,
            "callback %s: %s job_id=%s kind=%s attempt=%d",
            *(state, outcome.note, taken.job_id, record.kind if record else "?", taken.attempt),
        )

    def _delay_s(self, record: OutboxRecord, outcome: Outcome) -> float | None:
        if not isinstance(outcome, DeliveryFailed):
            return None
        num_failures = record.failures + 1
        if not record.kind.is_end and num_failures > MAX_PROGRESS_FAILURES:
            return None
        return next_delay_s(
            num_failures,
            self._random,
            retry_delays_s=self._settings.retry_delays_s,
            retry_after_s=outcome.retry_after_s,
        )
