"""The body of `POST /v1/jobs` and `POST /v1/quote` to a job, and what to submit it with."""

from typing import Annotated

from fastapi import Body

from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from gateway.http.auth import Caller
from gateway.http.errors import ApiError, invalid_value
from gateway.jobs.callbacks import to_callback
from gateway.jobs.streams import Gateway
from gateway.openai.admission import Terms, check_goes_on, prepare
from gateway.openai.schemas import AnyJob
from gateway.settings import GatewaySettings

AskedJob = Annotated[AnyJob, Body(discriminator="endpoint")]


async def prepare_job(
    gateway: Gateway, asked: AnyJob, caller: Caller, *, idempotency_key: str, body_hash: str
) -> tuple[Job, Submission]:
    """Raises ApiError; parameters of the inner body are named below `body`."""
    settings = gateway.settings
    endpoint = Endpoint(asked.endpoint)
    terms = Terms(
        caller=caller,
        lane=asked.lane,
        deadline_s=asked.deadline_s or settings.job_deadline_s,
        retention_s=_retention_s(settings, asked, caller),
        metadata=asked.metadata or {},
        callback=to_callback(asked.callback, caller.tenant, settings),
        idempotency_key=idempotency_key,
        body_hash=body_hash,
    )
    try:
        check_goes_on(asked.body)
        return await prepare(
            gateway.broker, gateway.grammars, settings, endpoint, asked.body, terms
        )
    except ApiError as exc:
        if exc.param not in (None, "lane"):
            exc.param = f"body.{exc.param}"
        raise


def _retention_s(settings: GatewaySettings, asked: AnyJob, caller: Caller) -> float:
    """Seconds from the job's end on. Raises ApiError where more is asked than is allowed here."""
    if asked.retention_s is None:
        return caller.job_retention_s(settings)
    if asked.retention_s > settings.max_retention_s:
        most = f"{settings.max_retention_s:g}"
        raise invalid_value("retention_s", f"retention_s may be at most {most} here")
    return asked.retention_s
