"""POST /v1/chat/completions, /v1/completions, Anthropic's /v1/messages, /v1/embeddings, /v1/rerank,
/v1/score and /v1/classify: synchronous calls, answered whole, as a stream, or as a job. Cohere's
and other clients have further paths of the same call for a rerank.
"""

import logging
from collections.abc import Awaitable, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from contract.answers import Chunks
from contract.api_keys import Scope
from contract.function_types import JobView, Submission
from contract.jobs import Endpoint, Job, JobStatus
from gateway.follow.answer_models import (
    ChatCompletion,
    Classes,
    Embeddings,
    MessageObject,
    MessageTokens,
    Ranking,
    Scores,
    TextCompletion,
)
from gateway.follow.job_objects import AcceptedJob, accepted_response, submitted_object
from gateway.follow.message_events import MessageEvents
from gateway.follow.streams import call_stream, whole_answer
from gateway.follow.sync_call import START, AskedPosition, AskedTimeLimit, ServerTiming, SyncCall
from gateway.http import sse
from gateway.http.bodies import ClientGone, JsonBodies, unless_gone
from gateway.http.errors import (
    NO_RETRY,
    ApiError,
    ContextExceeded,
    UnknownJob,
    invalid_value,
    rate_headers,
)
from gateway.http.handlers import answers
from gateway.prepare.admission import Caller, Inference
from gateway.prepare.calls import check_goes_on
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.messages import MessagesBody, PromptBody, prepare_any_call
from gateway.prepare.next_turn import then_warmed
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.unsupported import CallFields, ignored_header
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from gateway.redis.broker import Broker
from gateway.routes.requests import GuardedRoute
from gateway.runners.submission import check_first_calls
from gateway.state import AcceptingGateway, Gateway, ThisGateway

log = logging.getLogger("batchway.gateway")

_Streamed = ChatBody | CompletionBody | MessagesBody

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
    route_class=GuardedRoute,
    tags=["calls"],
    responses={
        202: {"model": AcceptedJob, "description": "Accepted as a job"},
        **answers(401, 403, 404, 409, 415, 429, 504),
    },
)


async def submit_job(
    gateway: Gateway, job: Job, submission: Submission, headers: Mapping[str, str]
) -> tuple[AcceptedJob, dict[str, str]]:
    """Queues a job. Returns what accepted_response shows."""
    timing = ServerTiming()
    if job.flow is not None and not submission.start_at_s:
        await check_first_calls(gateway, job, submission)
    submitted = await gateway.submit(job, submission)
    timing.mark("admission")
    status = JobStatus.QUEUED
    start_ms: float | None = None
    if submitted.is_new:
        start_ms = None if submitted.position else submission.start_at_s * 1000
        job = msgspec.structs.replace(job, id=submitted.job_id)
        num_prompt = job.num_prompt_tokens
        log.info("accepted job_id=%s lane=%s num_prompt=%d", job.id, job.lane, num_prompt)
    else:
        view = await _known_job(gateway, submitted.job_id, job.tenant)
        job, status, start_ms = view.job, view.status, view.start_ms
    wait = await gateway.broker.worker_wait(job, status)
    shown = submitted_object(job, submitted, status, wait, start_ms)
    return shown, {**headers, **rate_headers(submitted.rates), **timing.headers()}


async def _known_job(gateway: Gateway, job_id: str, tenant: str) -> JobView:
    """The job found by an Idempotency-Key. Raises ApiError if it is no longer stored."""
    try:
        view, _ = await gateway.broker.read(job_id, tenant)
    except UnknownJob:
        message = "the answer to this Idempotency-Key is no longer kept: use a new key"
        raise ApiError(409, "result_expired", message, headers=NO_RETRY) from None
    return view


async def check_may_change(
    broker: Broker, caller: Caller, job_id: str, tenant: str | None = None
) -> None:
    """Raises ApiError (403) if the caller's key does not permit the job's lane; UnknownJob.
    `tenant`: the job's, by default the caller's."""
    if caller.terms.lanes:
        view, _ = await broker.read(job_id, tenant or caller.tenant)
        caller.check_lane(view.lane)


async def body_hash(request: Request, key: str, endpoint: str) -> str:
    """Returns a hash that is equal for equal bodies; '' without an Idempotency-Key. Raises Busy."""
    if not key:
        return ""
    bodies: JsonBodies = request.app.state.gateway.bodies
    return await bodies.hash(await request.body(), endpoint)


async def asked_call(
    request: Request,
    caller: Inference,
    gateway: AcceptingGateway,
    time_limit: AskedTimeLimit,
    position: AskedPosition,
    key: IdempotencyKey = "",
) -> SyncCall:
    """Raises ApiError."""
    if time_limit.may_become_job:
        caller.check_scope(Scope.JOBS_WRITE)
    return SyncCall(request, gateway, time_limit, position=position, key=key)


AskedCall = Annotated[SyncCall, Depends(asked_call)]


async def answer_call(
    call: SyncCall, caller: Caller, endpoint: Endpoint, body: CallBody | MessagesBody
) -> Response:
    """Submits the call's job and returns its output, whole or as a stream. Returns the job instead
    if the caller prefers that, or when the time limit is reached."""
    settings, limit = call.gateway.settings, call.time_limit
    # A caller that gets 202 at once is not expected to stay.
    is_attended = ends_with_caller(body, call.key) and not limit.wants_job
    hashed = await body_hash(call.request, call.key, endpoint)
    job = caller.job(endpoint, body)
    submission = caller.call_submission(
        settings,
        body,
        may_become_job=limit.may_become_job,
        attendance_s=settings.attendance_s if is_attended else 0.0,
        idempotency_key=call.key,
        body_hash=hashed,
    )
    if limit.wants_job:
        check_goes_on(body)
        prepared = await prepare_any_call(call.gateway, body, job, submission)
        headers = call.headers | ignored_header(body)
        return accepted_response(*await submit_job(call.gateway, *prepared, headers))
    _check_resumes(call, body)
    work = prepare_any_call(call.gateway, body, job, submission)
    await begin(call, caller, *await unless_gone(call.request.receive, work))
    call.headers |= ignored_header(body)
    with call.named_errors():
        shown: Chunks | MessageEvents
        if isinstance(body, MessagesBody):
            shown = MessageEvents(call.job, body.max_tokens, body.shows_thinking)
            if not body.stream:
                return await answer_whole(call, whole_answer(call, shown))
        elif isinstance(body, _Streamed) and body.stream:
            usage = {"includes_usage": body.includes_usage, "repeats_usage": body.repeats_usage}
            shown = Chunks(call.job, await call.gateway.tokenizer_for(call.job), **usage)
        else:
            return await answer_whole(call, whole_answer(call))
        has_ids = bool(call.key) or body.on_disconnect == "continue"
        events = call_stream(call, shown, has_ids=has_ids)
        call.headers |= call.timing.headers()
        return await sse.sse_response(
            call.request, events, headers=call.headers, on_gone=call.on_gone
        )


async def begin(call: SyncCall, caller: Caller, job: Job, submission: Submission) -> None:
    """Queues the job of a call that waits for its answer. An earlier job with the same idempotency
    key answers in its place: the caller may cancel it, so its current lane must be permitted.
    Raises ApiError, and the errors of Broker.submit."""
    gateway = call.gateway
    submitted_s = gateway.broker.clock()
    if job.flow is not None:
        await check_first_calls(gateway, job, submission)
    job = msgspec.structs.replace(job, channel=gateway.broker.channel)
    submitted = await gateway.submit(job, submission)
    call.timing.mark("admission")
    if not submitted.is_new:
        view = await _known_job(gateway, submitted.job_id, job.tenant)
        caller.check_lane(view.lane)
        job = await gateway.whole(view.job)
    else:
        job = msgspec.structs.replace(job, id=submitted.job_id)
    call.note_queued(
        job,
        submitted,
        submitted_s=submitted_s,
        may_return=not submission.attendance_s,
        job_retention_s=caller.job_retention_s(gateway.settings),
    )


async def answer_whole(call: SyncCall, work: Awaitable[Mapping[str, Any]]) -> Response:
    """Waits for the answer of a call. Raises ClientGone if the caller leaves."""
    try:
        answer = await unless_gone(call.request.receive, work)
    except ClientGone:
        await call.on_gone()
        raise
    call.timing.mark("total")
    return sse.json_response(answer, headers=call.headers | call.timing.headers())


def ends_with_caller(body: CallFields, key: str) -> bool:
    """Whether a disconnect cancels the job. With an idempotency key the caller may come back."""
    return not key if body.on_disconnect is None else body.on_disconnect == "cancel"


def _check_resumes(call: SyncCall, body: CallBody | MessagesBody) -> None:
    """Raises ApiError if a position is given for anything but the caller's own earlier stream."""
    is_stream = isinstance(body, _Streamed) and body.stream
    if call.position is not START and not (call.key and is_stream):
        param = "Last-Event-ID" if "last-event-id" in call.request.headers else "starting_after"
        message = (
            f"{param} goes on with the stream of an earlier call: that needs stream: true, the "
            "same body and its Idempotency-Key"
        )
        raise invalid_value(param, message)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: EVENTS})
async def create_chat_completion(call: AskedCall, caller: Inference, body: ChatBody) -> Response:
    """Answers a conversation, whole or as a stream."""
    return then_warmed(await answer_call(call, caller, Endpoint.CHAT, body), call, lambda: body)


@router.post("/v1/completions", response_model=TextCompletion, responses={200: EVENTS})
async def create_completion(call: AskedCall, caller: Inference, body: CompletionBody) -> Response:
    """Continues a prompt, whole or as a stream."""
    return await answer_call(call, caller, Endpoint.COMPLETIONS, body)


@router.post("/v1/messages", response_model=MessageObject, responses={200: EVENTS, **answers(529)})
async def create_message(call: AskedCall, caller: Inference, body: MessagesBody) -> Response:
    """Answers a conversation in Anthropic's form, whole or as a stream; its job is a chat's."""
    answer = await answer_call(call, caller, Endpoint.CHAT, body)
    return then_warmed(answer, call, body.chat, "toolu")


@router.post("/v1/messages/count_tokens", responses=answers(529))
async def count_tokens(caller: Inference, gateway: ThisGateway, body: PromptBody) -> MessageTokens:
    """The tokens that the model would be given, without a call of it; where they are more than its
    context, at least so many."""
    submission = caller.call_submission(gateway.settings, body, may_become_job=False)
    try:
        job = caller.job(Endpoint.CHAT, body)
        job, _ = await prepare_any_call(gateway, body, job, submission)
    except ContextExceeded as exc:
        return MessageTokens(input_tokens=exc.num_prompt)
    return MessageTokens(input_tokens=job.num_prompt_tokens)


@router.post("/v1/embeddings", response_model=Embeddings)
async def create_embeddings(call: AskedCall, caller: Inference, body: EmbeddingsBody) -> Response:
    """Turns texts into vectors."""
    return await answer_call(call, caller, Endpoint.EMBEDDINGS, body)


@router.post("/rerank", response_model=Ranking, include_in_schema=False)
@router.post("/v2/rerank", response_model=Ranking, include_in_schema=False)
@router.post("/v1/rerank", response_model=Ranking)
async def rerank(call: AskedCall, caller: Inference, body: RerankBody) -> Response:
    """Orders documents by their relevance to a query."""
    return await answer_call(call, caller, Endpoint.RERANK, body)


@router.post("/v1/score", response_model=Scores)
async def score(call: AskedCall, caller: Inference, body: ScoreBody) -> Response:
    """Scores pairs of texts."""
    return await answer_call(call, caller, Endpoint.SCORE, body)


@router.post("/v1/classify", response_model=Classes)
async def classify(call: AskedCall, caller: Inference, body: ClassifyBody) -> Response:
    """Gives each text a label."""
    return await answer_call(call, caller, Endpoint.CLASSIFY, body)
