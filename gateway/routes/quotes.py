"""POST /v1/quote: the cost and expected times of a job, without queueing it."""

import time
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from contract.function_types import Quote
from contract.jobs import Job
from gateway.follow.answer_models import EndpointPath
from gateway.follow.job_objects import UnixSeconds, place
from gateway.http.errors import to_api_error
from gateway.http.handlers import answers
from gateway.http.load_headers import rate_headers
from gateway.prepare.auth import Inference
from gateway.routes.jobs import AskedJob, prepare_job
from gateway.routes.requests import CallRoute, WellFormed
from gateway.runners.flows.quotes import quote_first_calls
from gateway.state import ThisGateway

router = APIRouter(route_class=CallRoute, tags=["calls"], responses=answers(401, 403, 429))


class Refusal(BaseModel):
    status: int
    code: str
    message: str
    retry_after_s: float | None


class QuoteObject(BaseModel):
    object: Literal["quote"] = "quote"
    endpoint: EndpointPath
    model: str
    lane: str
    prompt_tokens: int
    predicted_output_tokens: int
    position: int | None
    eta_s: float | None
    run_s: float | None
    finished_at: UnixSeconds | None
    is_admitted: bool
    refusal: Refusal | None


@router.post("/v1/quote", responses=answers(404, 415))
async def quote_job(
    caller: Inference,
    _checked: WellFormed,
    gateway: ThisGateway,
    asked: AskedJob,
    response: Response,
) -> QuoteObject:
    """Answers as `POST /v1/jobs` would for the same body."""
    job, submission = await prepare_job(gateway, asked, caller, idempotency_key="", body_hash="")
    quote = await gateway.broker.quote(job, submission)
    response.headers.update(rate_headers(quote.rates))
    if job.flow is not None and quote.refusal is None:
        quote = await quote_first_calls(gateway, job, submission)
    return _shown(job, quote)


def _shown(job: Job, quote: Quote) -> QuoteObject:
    wait_s, run_s = quote.position.eta_s, quote.service_s
    finished_at = None
    if wait_s is not None and run_s is not None:
        finished_at = round(time.time() + wait_s + run_s, 1)
    num_prompt = job.num_prompt_tokens
    return QuoteObject(
        endpoint=job.endpoint.value,
        model=job.named_model,
        lane=job.lane,
        prompt_tokens=num_prompt,
        predicted_output_tokens=quote.cost_tokens - num_prompt,
        **place(quote.position),
        run_s=None if run_s is None else round(run_s, 1),
        finished_at=finished_at,
        is_admitted=quote.refusal is None,
        refusal=_refusal(quote),
    )


def _refusal(quote: Quote) -> Refusal | None:
    if quote.refusal is None:
        return None
    error = to_api_error(quote.refusal)
    return Refusal(
        status=error.status,
        code=error.code,
        message=error.message,
        retry_after_s=quote.refusal.retry_after_s,
    )
