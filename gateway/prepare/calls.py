"""Makes jobs of calls, to models and to flows, with the bounds of their lanes.

A call that the model cannot run is rejected with 400 and the parameter's name.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from contract.errors import BatchwayError
from contract.function_types import Submission
from contract.jobs import DEFAULT_LANES, Endpoint, Job
from contract.model_cards import ModelCard
from contract.residence import marks_of
from gateway.http.errors import (
    UNSUPPORTED,
    ApiError,
    bad_request,
    invalid_value,
    no_such_model,
)
from gateway.models.tokens import ModelTokenizer
from gateway.prepare.flow_calls import as_flow, check_tokens, chosen_model, deciding_cards
from gateway.prepare.generation import prepare_generation
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.schemas import SHOWN, ChatBody, CompletionBody
from gateway.prepare.unsupported import MAX_SESSION, SESSION, CallFields
from gateway.prepare.vectors import prepare_vectors
from gateway.redis.broker import Broker
from gateway.redis.known_models import NotAnnounced, model_failed
from gateway.settings import GatewaySettings, LaneBound
from gateway.state import Gateway

INTERACTIVE_TARGET_S = 10.0  # seconds to the first token that an interactive user will wait
_PREDICTED_SHARE = 0.5  # of the available time, because throughput may halve while a job waits
# Bytes in Redis of a job that has run. Measured: 6.5 kB plus 13 bytes per output token, so 32 is an
# upper bound for jobs of 350 tokens or more.
BYTES_PER_TOKEN = 32
WAITING_SHARE = 0.4  # share of Redis's memory for the jobs waiting in a lane
STORED_FACTOR = 8  # times Redis's memory, because most stored data is in the object store
TENANT_SHARE = 0.5  # share of it for one tenant


async def prepare_call(
    gateway: Gateway, body: CallBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """Returns the job of a call with its prompts, and its submission with the bounds of the lane.
    `job` and `submission`: as Caller makes them. Raises ApiError, JobRefused."""
    known = gateway.broker.known
    job = replace(job, model=await known.named(job.model))
    if isinstance(body, ChatBody) and body.store:
        kept = body.model_dump_json(include=SHOWN, by_alias=True, exclude_unset=True)
        metadata = {**(body.metadata or {}), **submission.metadata}
        submission = replace(submission, metadata=metadata)
        job = replace(job, response=kept.encode())
    if not job.session:
        job = replace(job, session=session_of(body, submission))
    if body.priority is not None:
        submission = replace(submission, priority=body.priority)
    card = (await known.models()).get(job.model)
    if card is None:
        raise await unknown_model_error(gateway.broker, job.model, job.tenant)
    if card.flow is not None:
        return await _prepare_flow(gateway, card, body, job, submission)
    memory_bytes, tokenizer = await known.max_memory_bytes(), await known.tokenizer(card)
    if isinstance(body, ChatBody | CompletionBody) and body.documents:
        own = body.chat_template if isinstance(body, ChatBody) else ""
        if tokenizer.template is None or not tokenizer.template.reads_documents(own):
            message = f"documents: {body.model!r} is no flow, and its chat template reads none"
            raise bad_request(UNSUPPORTED, message, "documents")
    submission = admit(gateway.settings, card, job, submission, memory_bytes)
    job, submission = await _prepare_prompts(gateway, card, tokenizer, body, job, submission)
    if gateway.settings.prefers_cached:
        submission = replace(submission, marks=marks_of(job))
    return job, submission


def session_of(body: CallFields, submission: Submission) -> str:
    """The session that a call names: `prompt_cache_key`, or that in its metadata; "": none."""
    metadata = {**(body.metadata or {}), **submission.metadata}
    return (body.prompt_cache_key or metadata.get(SESSION, ""))[:MAX_SESSION]


async def _prepare_prompts(
    gateway: Gateway,
    card: ModelCard,
    tokenizer: ModelTokenizer,
    body: CallBody,
    job: Job,
    submission: Submission,
) -> tuple[Job, Submission]:
    """Raises ApiError."""
    if isinstance(body, ChatBody | CompletionBody):
        return await prepare_generation(gateway, card, tokenizer, body, job, submission)
    return await prepare_vectors(card, tokenizer, body, job, submission)


async def _prepare_flow(
    gateway: Gateway, card: ModelCard, body: CallBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """A route by rules becomes a job of the model that it chooses, any other flow a job that calls
    its members. Raises ApiError, JobRefused."""
    broker = gateway.broker
    if (model := await chosen_model(broker, card, body, job, submission)) is not None:
        chosen = body.model_copy(update={"model": model})
        of_model = replace(job, model=model)
        of_model, submission = await prepare_call(gateway, chosen, of_model, submission)
        return replace(of_model, asked_model=body.model), submission
    deciding = deciding_cards(card, await broker.known.models())
    check_tokens(deciding, body)
    memory_bytes = await broker.known.max_memory_bytes()
    submission = admit(gateway.settings, card, job, submission, memory_bytes)
    job, submission = await _prepare_any_of(gateway, deciding, body, job, submission)
    check_tokens(deciding, body, job)
    return await as_flow(gateway, card, body, job, submission)


async def _prepare_any_of(
    gateway: Gateway,
    cards: Sequence[ModelCard],
    body: CallBody,
    job: Job,
    submission: Submission,
) -> tuple[Job, Submission]:
    """Prepares a flow's call with the first of its deciding members that can take it; each renders,
    tokenises and checks by itself. If none can, raises the first one's ApiError."""
    errors = list[ApiError]()
    for card in cards:
        try:
            tokenizer = await gateway.broker.known.tokenizer(card)
            return await _prepare_prompts(gateway, card, tokenizer, body, job, submission)
        except ApiError as exc:
            errors.append(exc)
    raise errors[0]


async def unknown_model_error(broker: Broker, model: str, tenant: str) -> BatchwayError:
    """The error for a model that no worker has published. If it is declared, the call is noted as
    demand, in no lane, because its lanes are not known: otherwise its first worker never starts."""
    known, shard = broker.known, await broker.shards.home(tenant)
    if model in known.declared:
        await broker.request_worker(shard, model)
    if (failure := await known.failure_in(shard, model)) is not None:
        return model_failed(model, failure)
    if model in known.declared:
        start = await known.expected_in(shard, model)
        return NotAnnounced(model, None if start is None else start.ready_in_s)
    return no_such_model(model, {*await known.models(), *known.declared})


def admit(
    settings: GatewaySettings,
    card: ModelCard,
    job: Job,
    submission: Submission,
    memory_bytes: int,
) -> Submission:
    """The submission with the bounds of the lane. `memory_bytes`: of Redis. Raises ApiError if the
    model does not answer such calls in the lane."""
    check_endpoint(card, job.endpoint)
    check_lane(card, job.lane)
    bound_tokens, bound_s = bound_of(settings, job.lane, memory_bytes)
    max_stored_bytes, max_tenant_stored_bytes = stored_bounds(settings, memory_bytes)
    return replace(
        submission,
        lane_bound_tokens=bound_tokens,
        lane_bound_s=bound_s,
        batch_price=settings.batch_price,
        cached_price=settings.cached_price,
        max_stored_bytes=max_stored_bytes,
        max_tenant_stored_bytes=max_tenant_stored_bytes,
        cold_start_s=settings.cold_start_s,
        # What is stored is read again; so may be an answer whose caller has a key to return with.
        is_ephemeral=submission.needs_worker
        and not submission.idempotency_key
        and not job.response
        and job.endpoint is not Endpoint.RESPONSES,
    )


def check_endpoint(card: ModelCard, endpoint: Endpoint) -> None:
    """Raises ApiError if the model does not answer calls of the endpoint."""
    if endpoint not in card.endpoints:
        answered = ", ".join(card.endpoints)
        message = f"the model {card.name!r} does not answer {endpoint}: it answers {answered}"
        raise bad_request("unsupported_endpoint", message, "model")


def check_goes_on(body: CallFields) -> None:
    """Raises ApiError if a job, which has no caller to disconnect, is to be cancelled on
    disconnect."""
    if body.on_disconnect == "cancel":
        message = "on_disconnect: nobody waits for a job, so nobody's leaving can cancel it"
        raise invalid_value("on_disconnect", message)


def check_lane(card: ModelCard, lane: str) -> None:
    """Raises ApiError if the model's workers do not serve the lane."""
    if lane not in card.lanes:
        message = f"lane {lane!r} is none of {', '.join(card.lanes)}"
        raise bad_request("unknown_lane", message, "lane")


async def check_is_lane(gateway: Gateway, lane: str) -> None:
    """Raises ApiError if no model has such a lane."""
    cards = await gateway.broker.known.models()
    lanes = {*DEFAULT_LANES, *(name for card in cards.values() for name in card.lanes)}
    if lane not in lanes:
        raise invalid_value("lane", f"lane must be one of {', '.join(sorted(lanes))}")


def default_wait_s(lane: str, sync_deadline_s: float) -> float:
    """The default limit of the predicted wait in seconds; 0 for `batch`, where nobody waits for a
    response. In other lanes callers wait at most until a call's deadline."""
    if lane == "batch":
        return 0.0
    target_s = INTERACTIVE_TARGET_S if lane == "interactive" else sync_deadline_s
    return min(target_s, sync_deadline_s) * _PREDICTED_SHARE


def tokens_in(memory_bytes: int) -> int:
    """How many tokens may wait in a lane, so that Redis has memory for their logs."""
    return int(memory_bytes * WAITING_SHARE / BYTES_PER_TOKEN)


def stored_bytes_beside(memory_bytes: int) -> int:
    """The bytes of jobs that may be stored, in Redis and its object store together. A Redis with
    less than 64 MiB counts as one of 64 MiB, because it rejects jobs by itself."""
    return max(memory_bytes, 2**26) * STORED_FACTOR


def bound_of(settings: GatewaySettings, lane: str, memory_bytes: int) -> tuple[int, float]:
    """Returns the limits of a lane in tokens and predicted seconds; 0: none. `memory_bytes`: of
    Redis. A lane's own setting takes precedence over the setting for all lanes, and that over the
    default."""
    own = settings.bounds_of_lanes.get(lane, LaneBound())
    tokens = (own.tokens, settings.lane_bound_tokens, tokens_in(memory_bytes))
    default_s = default_wait_s(lane, settings.sync_deadline_s)
    seconds = (own.wait_s, settings.lane_bound_s, default_s)
    return (
        next(bound for bound in tokens if bound is not None),
        next(bound for bound in seconds if bound is not None),
    )


def stored_bounds(settings: GatewaySettings, memory_bytes: int) -> tuple[int, int]:
    """The bytes that may be stored, of all jobs and of one tenant's (0: no limit). `memory_bytes`:
    of Redis."""
    whole = stored_bytes_beside(memory_bytes)
    own = settings.max_tenant_stored_bytes
    return whole, int(TENANT_SHARE * whole) if own is None else own
