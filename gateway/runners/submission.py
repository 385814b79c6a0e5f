"""Queues the job of a call if the calls with which its flow begins would be accepted."""

import time

from msgspec.structs import replace

from contract.errors import BatchwayError
from contract.function_types import Submission, Submitted
from contract.jobs import Job
from contract.telemetry.tracing import traced
from gateway.http.errors import to_api_error
from gateway.runners.flows.quotes import check_first_calls
from gateway.state import Gateway


async def submit(gateway: Gateway, job: Job, submission: Submission) -> Submitted:
    """Queues a job and counts the outcome. Raises the errors of Broker.submit."""
    job = traced(job, time.time_ns())
    if (callback := submission.callback) is not None and job.trace is not None:
        callback = replace(callback, traceparent=job.trace.traceparent)
        submission = replace(submission, callback=callback)
    try:
        if job.flow is not None:
            await check_first_calls(gateway, job, submission)
        submitted = await gateway.broker.submit(job, submission)
    except BatchwayError as exc:
        gateway.metrics.note_refusal(job, to_api_error(exc).code)
        raise
    gateway.metrics.note_acceptance(job, is_new=submitted.is_new)
    return submitted
