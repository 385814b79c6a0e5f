"""POST /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank, /v1/score and
/v1/classify: synchronous calls, answered whole, as a stream, or as a job. Cohere's and other
clients have further paths of the same call for a rerank.

Over 300 lines: the ways to answer one call.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from contract.api_keys import Scope
from contract.errors import BatchwayError
from contract.function_types import JobView, Submission, Submitted
from contract.jobs import Endpoint, Job, JobStatus
from gateway.follow.answer_models import (
    ChatCompletion,
    Classes,
    Embeddings,
    Ranking,
    Scores,
    TextCompletion,
)
from gateway.follow.job_objects import AcceptedJob, accepted_response, submitted_object
from gateway.follow.members import MODELS_HEADER, chosen_header
from gateway.follow.streams import START, AskedPosition, LogPosition, call_stream, whole_answer
from gateway.follow.sync_call import AskedPreference, Patience, Preference, SyncCall
from gateway.http import sse
from gateway.http.errors import (
    ApiError,
    ServerTiming,
    UnknownJob,
    invalid_value,
    rate_headers,
    to_call_error,
)
from gateway.http.handlers import answers
from gateway.prepare.admission import Caller, Inference, Terms, check_goes_on
from gateway.prepare.calls import prepare_call
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.unsupported import ignored_header
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from gateway.redis.broker import Broker
from gateway.routes.requests import CallRoute, WellFormed
from gateway.runners.submission import submit
from gateway.state import AcceptingGateway, Gateway

log = logging.getLogger("batchway.gateway")

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]{0,255}$",
        description="the same key and body: the job of the first call answers",
    ),
]

EVENTS: dict[str, Any] = {
    "description": "As asked",
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {name: {"type": "string"} for name in ("data", "event", "id")},
                "description": "server-sent events: JSON in `data`, the last one is `[DONE]`",
            }
        }
    },
}

router = APIRouter(
    route_class=CallRoute,
    tags=["calls"],
    responses={
        202: {"model": AcceptedJob, "description": "Accepted as a job"},
        **answers(401, 403, 404, 409, 415, 429, 504),
    },
)


async def submit_job(
    gateway: Gateway, job: Job, submission: Submission, headers: Mapping[str, str]
) -> Response:
    """Queues a job: 202 with its id."""
    timing = ServerTiming()
    submitted = await submit(gateway, job, submission)
    timing.mark("admission")
    status = JobStatus.QUEUED
    if submitted.is_new:
        _log_accepted(job)
    else:
        view = await _known_job(gateway, submitted.job_id, job.tenant)
        job, status = view.job, view.status
    shown = submitted_object(job, submitted, status)
    answer_headers = {**headers, **rate_headers(submitted.rates), **timing.headers()}
    return accepted_response(shown, answer_headers)


async def accepted_job(gateway: Gateway, job: Job, submitted: Submitted, caller: Caller) -> Job:
    """The job that answers: the new one, or the earlier one with the same idempotency key. The
    caller may cancel it, so its current lane must be permitted. Raises ApiError."""
    if submitted.is_new:
        return job
    view = await _known_job(gateway, submitted.job_id, job.tenant)
    caller.check_lane(view.lane)
    return await gateway.whole(view.job)


async def _known_job(gateway: Gateway, job_id: str, tenant: str) -> JobView:
    """The job found by an Idempotency-Key. Raises ApiError if it is no longer stored."""
    try:
        view, _ = await gateway.broker.read(job_id, tenant)
    except UnknownJob:
        message = "the answer to this Idempotency-Key is no longer kept: use a new key"
        raise ApiError(
            409, "result_expired", message, headers={"x-should-retry": "false"}
        ) from None
    return view


async def check_may_change(broker: Broker, caller: Caller, job_id: str) -> None:
    """Raises ApiError (403) if the caller's key does not permit the job's lane; UnknownJob."""
    if caller.terms.lanes:
        view, _ = await broker.read(job_id, caller.tenant)
        caller.check_lane(view.lane)


def body_hash(key: str, endpoint: str, raw: Mapping[str, Any]) -> str:
    """Returns a hash that is equal for equal bodies; '' without an Idempotency-Key."""
    if not key:
        return ""
    text = json.dumps([endpoint, raw], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _log_accepted(job: Job) -> None:
    log.info("accepted job_id=%s lane=%s num_prompt=%d", job.id, job.lane, job.num_prompt_tokens)


class CallOptions(msgspec.Struct, frozen=True):
    """The parts of a call's request outside its body."""

    request: Request
    caller: Caller
    gateway: Gateway
    preference: Preference
    position: LogPosition
    key: str
    timing: ServerTiming

    @property
    def patience(self) -> Patience:
        settings = self.gateway.settings
        return Patience.of(
            self.request,
            self.preference,
            sync_limit_s=settings.sync_limit_s,
            longest_s=settings.sync_deadline_s,
        )


async def call_options(
    request: Request,
    caller: Inference,
    _checked: WellFormed,
    gateway: AcceptingGateway,
    preference: AskedPreference,
    position: AskedPosition,
    key: IdempotencyKey = "",
) -> CallOptions:
    """Raises ApiError."""
    if preference.is_given:
        caller.check_scope(Scope.JOBS_WRITE)  # the call may become a job
    return CallOptions(request, caller, gateway, preference, position, key, ServerTiming())


AskedOptions = Annotated[CallOptions, Depends(call_options)]


async def answer_call(options: CallOptions, endpoint: Endpoint, body: CallBody) -> Response:
    """Submits the call's job and returns its output, whole or as a stream. Returns the job instead
    if the caller prefers that, or when the time limit is reached."""
    request, gateway, caller = options.request, options.gateway, options.caller
    preference, key, timing = options.preference, options.key, options.timing
    patience, position = options.patience, options.position
    hashed = body_hash(key, endpoint, await request.json())
    terms = _terms(gateway, caller, preference, body, key, hashed)
    if preference.is_at_once:
        check_goes_on(body)
        prepared = await prepare_call(gateway, endpoint, body, terms)
        return await submit_job(gateway, *prepared, preference.applied() | ignored_header(body))
    _check_resumes(request, position, body, key)
    work = prepare_call(gateway, endpoint, body, terms)
    try:
        job, submission = await sse.unless_gone(request.receive, work)
    except sse.ClientGone:
        return Response(status_code=499)  # the client never sees this
    submitted_s = gateway.broker.clock()
    submitted = await submit(gateway, job, submission)
    timing.mark("admission")
    job = await accepted_job(gateway, job, submitted, caller)
    answer_headers = preference.applied() | ignored_header(body) | rate_headers(submitted.rates)
    headers = {"x-job-id": job.id, **answer_headers, **chosen_header(job)}
    call = SyncCall(
        gateway.broker,
        gateway.settings,
        job,
        patience,
        timing,
        job_retention_s=caller.job_retention_s(gateway.settings),
        submitted_s=submitted_s if submitted.is_new else None,
        may_return=not _ends_with_caller(body, key),
        headers=headers,
    )
    try:
        if not isinstance(body, ChatBody | CompletionBody) or not body.stream:
            return await _whole(request, gateway, call, headers)
        events = call_stream(
            gateway,
            call,
            includes_usage=body.includes_usage,
            repeats_usage=body.repeats_usage,
            has_ids=bool(key) or body.on_disconnect == "continue",
            position=position,
            starts_over=position is not START and submitted.is_new,
        )
        headers |= timing.headers()
        return await sse.sse_response(request, events, headers=headers, on_gone=call.on_gone)
    except BatchwayError as exc:
        error = to_call_error(exc)
        names = ("x-job-id", MODELS_HEADER)
        error.headers |= {name: headers[name] for name in names if name in headers}
        raise error from exc


def _terms(
    gateway: Gateway,
    caller: Caller,
    preference: Preference,
    body: CallBody,
    key: str,
    hashed: str,
) -> Terms:
    """Returns the terms of a call, or of a job if the caller accepts that the call becomes one."""
    settings = gateway.settings
    is_job = preference.is_given
    # A caller that gets 202 at once is not expected to stay.
    is_attended = _ends_with_caller(body, key) and not preference.is_at_once
    return Terms(
        caller=caller,
        deadline_s=settings.job_deadline_s if is_job else settings.sync_deadline_s,
        retention_s=caller.job_retention_s(settings)
        if is_job
        else caller.sync_retention_s(settings),
        attendance_s=settings.attendance_s if is_attended else 0.0,
        # A caller that accepts a job can also wait for a worker.
        needs_worker=not is_job,
        idempotency_key=key,
        body_hash=hashed,
    )


def _ends_with_caller(body: CallBody, key: str) -> bool:
    """Whether a disconnect cancels the job. With an idempotency key the caller may come back."""
    return not key if body.on_disconnect is None else body.on_disconnect == "cancel"


async def _whole(
    request: Request, gateway: Gateway, call: SyncCall, headers: Mapping[str, str]
) -> Response:
    try:
        answer = await sse.unless_gone(request.receive, whole_answer(gateway, call))
    except sse.ClientGone:
        await call.on_gone()
        return Response(status_code=499)  # the client never sees this
    except sse.AnsweredOtherwise as exc:
        return exc.response
    call.timing.mark("total")
    return sse.json_response(answer, headers={**headers, **call.timing.headers()})


def _check_resumes(request: Request, position: LogPosition, body: CallBody, key: str) -> None:
    """Raises ApiError if a position is given for anything but the caller's own earlier stream."""
    is_stream = isinstance(body, ChatBody | CompletionBody) and body.stream
    if position is not START and not (key and is_stream):
        param = "Last-Event-ID" if "last-event-id" in request.headers else "starting_after"
        message = (
            f"{param} goes on with the stream of an earlier call: that needs stream: true, the "
            "same body and its Idempotency-Key"
        )
        raise invalid_value(param, message)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: EVENTS})
async def create_chat_completion(options: AskedOptions, body: ChatBody) -> Response:
    """Answers a conversation, whole or as a stream."""
    return await answer_call(options, Endpoint.CHAT, body)


@router.post("/v1/completions", response_model=TextCompletion, responses={200: EVENTS})
async def create_completion(options: AskedOptions, body: CompletionBody) -> Response:
    """Continues a prompt, whole or as a stream."""
    return await answer_call(options, Endpoint.COMPLETIONS, body)


@router.post("/v1/embeddings", response_model=Embeddings)
async def create_embeddings(options: AskedOptions, body: EmbeddingsBody) -> Response:
    """Turns texts into vectors."""
    return await answer_call(options, Endpoint.EMBEDDINGS, body)


@router.post("/rerank", response_model=Ranking, include_in_schema=False)
@router.post("/v2/rerank", response_model=Ranking, include_in_schema=False)
@router.post("/v1/rerank", response_model=Ranking)
async def rerank(options: AskedOptions, body: RerankBody) -> Response:
    """Orders documents by their relevance to a query."""
    return await answer_call(options, Endpoint.RERANK, body)


@router.post("/v1/score", response_model=Scores)
async def score(options: AskedOptions, body: ScoreBody) -> Response:
    """Scores pairs of texts."""
    return await answer_call(options, Endpoint.SCORE, body)


@router.post("/v1/classify", response_model=Classes)
async def classify(options: AskedOptions, body: ClassifyBody) -> Response:
    """Gives each text a label."""
    return await answer_call(options, Endpoint.CLASSIFY, body)
