"""A job as `/v1/jobs` shows it."""

import re
from typing import Any

from contract.callback_state import CallbackState
from contract.calls import JobView, Position, Submitted
from contract.jobs import Job, JobStatus, public_status
from gateway.http.errors import UnknownJob
from gateway.openai.answers import usage

_JOB_ID = re.compile(r"job-\d{1,4}-[0-9a-f]{32}")


def checked_id(job_id: str) -> str:
    """What is no job id looks like a job that does not exist. Raises UnknownJob."""
    if not _JOB_ID.fullmatch(job_id):
        raise UnknownJob(job_id[:64])
    return job_id


def events_url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}/events"


def place(position: Position | None) -> dict[str, Any]:
    """Jobs ahead, and seconds until it starts; null where it does not wait, or nothing is known."""
    if position is None:
        return {"position": None, "eta_s": None}
    eta_s = None if position.eta_s is None else round(position.eta_s, 1)
    return {"position": position.num_jobs_ahead, "eta_s": eta_s}


def submitted_object(job: Job, submitted: Submitted, status: JobStatus) -> dict[str, Any]:
    """What a submission answers; of a job that was accepted before, its place is not known."""
    return {
        "id": submitted.job_id,
        "object": "job",
        "status": public_status(status),
        "endpoint": job.endpoint,
        "model": job.model,
        "lane": job.lane,
        **place(submitted.position if submitted.is_new else None),
        "events_url": events_url(submitted.job_id),
    }


def accepted_object(view: JobView) -> dict[str, Any]:
    """A job that is handed over to its caller later than at submission."""
    return {
        "id": view.job.id,
        "object": "job",
        "status": public_status(view.status),
        "endpoint": view.job.endpoint,
        "model": view.job.model,
        "lane": view.lane,
        **place(view.position),
        "events_url": events_url(view.job.id),
    }


def job_object(view: JobView) -> dict[str, Any]:
    """The job without its result, which `GET /v1/jobs/{id}` adds."""
    return {
        "id": view.job.id,
        "object": "job",
        "status": public_status(view.status),
        "endpoint": view.job.endpoint,
        "model": view.job.model,
        "lane": view.lane,
        **place(view.position),
        "attempt": view.attempt,
        "metadata": dict(view.metadata),
        "usage": usage(view.job, view.num_prompt_tokens, view.num_output_tokens),
        "timings": {
            "queued_at": _seconds(view.created_ms),
            "started_at": _seconds(view.claimed_ms),
            "first_token_at": _seconds(view.first_token_ms),
            "finished_at": _seconds(view.finished_ms),
            "deadline_at": _seconds(view.deadline_ms),
        },
        "predicted_wait_s": _seconds(view.predicted_wait_ms),
        "wait_s": None if view.claimed_ms is None else _seconds(view.claimed_ms - view.created_ms),
        "error": {"code": view.code, "message": view.message} if view.code else None,
        "events_url": events_url(view.job.id),
    }


def callback_object(found: CallbackState | None) -> dict[str, Any] | None:
    """How far the job's callback is; null where it has none."""
    if found is None:
        return None
    return {
        "state": found.state,
        "attempts": found.num_attempts,
        "next_attempt_at": _seconds(found.next_attempt_ms),
    }


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
