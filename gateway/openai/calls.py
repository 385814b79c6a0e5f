"""Turns a call into a job, by the kind of its endpoint."""

from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from gateway.openai.admission import Admission, Terms, admit
from gateway.openai.generation import prepare_generation
from gateway.openai.job_bodies import CallBody
from gateway.openai.schemas import ChatBody, CompletionBody
from gateway.openai.structured import GrammarCompiler
from gateway.openai.vectors import prepare_vectors
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings


async def prepare_call(
    broker: Broker,
    grammars: GrammarCompiler,
    settings: GatewaySettings,
    endpoint: Endpoint,
    body: CallBody,
    terms: Terms,
) -> tuple[Job, Submission]:
    """Returns the job and its submission. Raises ApiError."""
    return await prepare_admitted(
        grammars, await admit(broker, settings, endpoint, body, terms), body
    )


async def prepare_admitted(
    grammars: GrammarCompiler, admission: Admission, body: CallBody
) -> tuple[Job, Submission]:
    """The same for a call whose model is known. Raises ApiError."""
    if isinstance(body, ChatBody | CompletionBody):
        return await prepare_generation(grammars, admission, body)
    return await prepare_vectors(admission, body)
