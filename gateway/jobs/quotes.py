"""POST /v1/quote: what a job would cost, when it would start and end; queues nothing."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from contract.calls import Quote
from contract.jobs import Job
from gateway.http.auth import Inference
from gateway.http.bodies import read_object
from gateway.http.errors import to_api_error
from gateway.http.load_headers import rate_headers
from gateway.http.routing import Route
from gateway.jobs.job_objects import place
from gateway.jobs.job_terms import prepare_job
from gateway.openai.schemas import parse_job
from gateway.openai.sync_answers import gateway_of, json_response

router = APIRouter(route_class=Route)


@router.post("/v1/quote")
async def quote_job(request: Request, caller: Inference) -> Response:
    """What `POST /v1/jobs` would say of the same body."""
    gateway = gateway_of(request)
    asked = parse_job(await read_object(request))
    job, submission = await prepare_job(gateway, asked, caller, idempotency_key="", body_hash="")
    quote = await gateway.broker.quote(job, submission)
    return json_response(_shown(job, quote), headers=rate_headers(quote.rates))


def _shown(job: Job, quote: Quote) -> dict[str, Any]:
    wait_s, run_s = quote.position.eta_s, quote.service_s
    finished_at = None
    if wait_s is not None and run_s is not None:
        finished_at = round(time.time() + wait_s + run_s, 1)
    num_prompt = job.num_prompt_tokens
    return {
        "object": "quote",
        "endpoint": job.endpoint,
        "model": job.model,
        "lane": job.lane,
        "prompt_tokens": num_prompt,
        "predicted_output_tokens": quote.cost_tokens - num_prompt,
        **place(quote.position),
        "run_s": None if run_s is None else round(run_s, 1),
        "finished_at": finished_at,
        "is_admitted": quote.refusal is None,
        "refusal": _refusal(quote),
    }


def _refusal(quote: Quote) -> dict[str, Any] | None:
    if quote.refusal is None:
        return None
    error = to_api_error(quote.refusal)
    return {
        "status": error.status,
        "code": error.code,
        "message": error.message,
        "retry_after_s": quote.refusal.retry_after_s,
    }
