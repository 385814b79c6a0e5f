"""Makes jobs of calls, to models and to flows."""

from collections.abc import Sequence

from msgspec.structs import replace

from contract.function_types import Submission
from contract.jobs import Job
from contract.model_cards import ModelCard
from gateway.http.errors import UNSUPPORTED, ApiError, bad_request
from gateway.models.tokens import ModelTokenizer
from gateway.prepare.admission import admit, unknown_model_error
from gateway.prepare.flow_calls import as_flow, check_tokens, chosen_model, deciding_cards
from gateway.prepare.generation import prepare_generation
from gateway.prepare.job_bodies import CallBody
from gateway.prepare.schemas import ChatBody, CompletionBody
from gateway.prepare.vectors import prepare_vectors
from gateway.state import Gateway


async def prepare_call(
    gateway: Gateway, body: CallBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """Returns the job of a call with its prompts, and its submission with the bounds of the lane.
    `job` and `submission`: as Caller makes them. Raises ApiError, JobRefused."""
    known = gateway.broker.known
    card = (await known.models()).get(job.model)
    if card is None:
        raise await unknown_model_error(gateway.broker, job.model, job.tenant)
    if card.flow is not None:
        return await _prepare_flow(gateway, card, body, job, submission)
    if isinstance(body, ChatBody | CompletionBody) and body.documents:
        message = f"documents: {body.model!r} is no flow, and only flows read documents"
        raise bad_request(UNSUPPORTED, message, "documents")
    memory_bytes, tokenizer = await known.max_memory_bytes(), await known.tokenizer(card)
    submission = admit(gateway.settings, card, job, submission, memory_bytes)
    return await _prepare_prompts(gateway, card, tokenizer, body, job, submission)


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
