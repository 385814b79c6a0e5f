"""What all routes share."""

import time
from typing import Annotated

import msgspec
from fastapi import Depends, Request
from msgspec import field
from msgspec.structs import replace

from contract.errors import BatchwayError
from contract.function_types import Submission, Submitted
from contract.jobs import Job
from contract.telemetry import tracing
from gateway.grammars.compiler import GrammarCompiler
from gateway.http.bodies import JsonBodies
from gateway.http.errors import Draining, to_api_error
from gateway.http.metrics import GatewayMetrics
from gateway.http.sse import StreamDrain
from gateway.models.step_templates import StepTemplates
from gateway.models.tokens import ModelTokenizer
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings
from gateway.turns import NUM_UPLOADS, UPLOADS_EACH, Turns, end_place


class Gateway(msgspec.Struct, frozen=True):
    """The state of one app."""

    settings: GatewaySettings
    broker: Broker
    drain: StreamDrain = field(default_factory=StreamDrain)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    grammars: GrammarCompiler = field(default_factory=GrammarCompiler)
    step_templates: StepTemplates = field(default_factory=StepTemplates)
    turns: Turns = field(default_factory=Turns)  # of work before the queue
    bodies: JsonBodies = field(default_factory=JsonBodies)
    uploads: Turns = field(default_factory=lambda: Turns(NUM_UPLOADS, UPLOADS_EACH))

    async def submit(self, job: Job, submission: Submission) -> Submitted:
        """Queues a job and counts the outcome; the reply has the id under which it is kept. Raises
        the errors of Broker.submit."""
        if tracing.current.get() is not None:
            job = tracing.traced(job, time.time_ns())
        if (callback := submission.callback) is not None and job.trace is not None:
            callback = replace(callback, traceparent=job.trace.traceparent)
            submission = replace(submission, callback=callback)
        try:
            submitted = await self.broker.submit(job, submission)
        except BatchwayError as exc:
            self.metrics.note_refusal(job, to_api_error(exc).code)
            raise
        self.metrics.note_acceptance(job, is_new=submitted.is_new)
        await end_place()
        return submitted

    async def whole(self, job: Job) -> Job:
        """The job with its prompt, if its response needs it. Raises PayloadError."""
        is_shown = job.return_token_ids or job.needs_tokenizer
        return await self.broker.payloads.whole(job) if is_shown else job

    async def tokenizer_for(self, job: Job) -> ModelTokenizer | None:
        """The tokenizer, if the job's response contains texts of tokens or an echo."""
        if not job.needs_tokenizer:
            return None
        card = (await self.broker.known.models()).get(job.model)
        return None if card is None else await self.broker.known.tokenizer(card)


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def accepting_gateway_of(request: Request) -> Gateway:
    """Raises ApiError while the gateway shuts down."""
    gateway = await gateway_of(request)
    if gateway.drain.has_begun:
        raise Draining
    return gateway


# Dependencies of endpoints.
ThisGateway = Annotated[Gateway, Depends(gateway_of)]
AcceptingGateway = Annotated[Gateway, Depends(accepting_gateway_of)]
