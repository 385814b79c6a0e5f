"""Job objects, as `/v1/jobs` returns them."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends, Path
from pydantic import BaseModel, Field
from starlette.responses import Response

from contract.answers import usage
from contract.function_types import JobMark, JobView, QueuePosition, Submitted
from contract.jobs import Endpoint, Job, JobStatus, MarkKind, ResumeKind, public_status
from contract.outbox import CallbackState
from gateway.follow.answer_models import (
    ChatCompletion,
    Classes,
    Embeddings,
    EndpointPath,
    Ranking,
    ResponseObject,
    Scores,
    TextCompletion,
    Usage,
)
from gateway.follow.members import TreeCall
from gateway.http.errors import UnknownJob
from gateway.http.sse import json_response
from gateway.redis.known_models import WorkerWait

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
UnixSeconds = Annotated[float, Field(description="Unix seconds")]

_JOB_ID = re.compile(r"job-\d{1,4}-[0-9a-f]{32}")


class AcceptedJob(BaseModel):
    """A job just queued, or one that a synchronous call has become."""

    id: str
    object: Literal["job"] = "job"
    status: JobState
    endpoint: EndpointPath
    model: str
    lane: str
    position: int | None = Field(description="jobs ahead; null where it does not wait")
    eta_s: float | None = Field(description="seconds until it starts; null where unknown")
    start_at: UnixSeconds | None = Field(description="it does not start before; null: at once")
    waiting_for: Literal["worker"] | None = Field(
        description="what it waits for beside its turn: no worker of its model is ready"
    )
    expected_start_s: float | None = Field(
        description="seconds until that worker should be ready; null where none is announced"
    )
    events_url: str


class JobToken(BaseModel):
    """With it a browser reads, follows and cancels the job, and nothing else."""

    object: Literal["job.token"] = "job.token"
    job_id: str
    value: str = Field(description="in place of an API key, or in the address: `?token=`")
    expires_at: UnixSeconds


class NewJob(AcceptedJob):
    token: JobToken | None = Field(None, description="there if the body asks for it")


class Timings(BaseModel):
    queued_at: UnixSeconds | None
    started_at: UnixSeconds | None
    first_token_at: UnixSeconds | None
    finished_at: UnixSeconds | None
    deadline_at: UnixSeconds | None


class JobError(BaseModel):
    code: str
    message: str


Cost = Annotated[
    float | None,
    Field(
        description="`completion_tokens` at the price of the model's output tokens that `/console` "
        "shows, of a flow the sum of its calls; null where it is not known, or the key lacks the "
        "scope `metrics`"
    ),
]


class MemberObject(BaseModel):
    """A call of a model by a flow."""

    model: str
    job_id: str
    status: JobState
    usage: Usage
    timings: Timings | None = Field(description="null where the call's record is gone")
    cost: Cost
    members: list["MemberObject"] | None = Field(description="its own calls, where it is a flow's")


class MarkObject(BaseModel):
    """What the engine did: chunks of the prompt, or the loss of the job's place in its memory."""

    kind: MarkKind = Field(
        description="`prefill`; `preempted`: its lane's other jobs needed the memory; `displaced`: "
        "for jobs that were admitted then"
    )
    started_at: UnixSeconds
    ended_at: UnixSeconds
    times: int = Field(description="chunks, or losses, one after the other")
    tokens: int = Field(description="computed, or lost and computed again")


class RunObject(BaseModel):
    """A worker's claim of the job; a second one goes on after `after_event` events of its log."""

    worker: str = Field(description="the last part of its name")
    started_at: UnixSeconds
    after_event: int
    marks: list[MarkObject] = Field(
        description="what its engine did beside the output, told with the output; as many as "
        "there is room for"
    )


class JobObject(AcceptedJob):
    """The job without its result, which `GET /v1/jobs/{id}` adds."""

    tenant: str
    attempt: int
    runs: list[RunObject] = Field(description="the last claims by workers, oldest first")
    metadata: dict[str, str]
    usage: Usage
    timings: Timings
    predicted_wait_s: float | None
    wait_s: float | None
    error: JobError | None
    resume: ResumeKind = Field(
        description="exact: after the death of its worker the job goes on with the tokens that it "
        "would have had; same-noise: with the same noise, but near-ties may fall the other way; "
        "distribution: with new noise"
    )
    parent: str | None = Field(description="the id of the flow's job that called the model")
    members: list[MemberObject] | None = Field(
        description="the calls of a flow; null in lists, and where the job is no flow's"
    )


class CallbackObject(BaseModel):
    """The state of the job's callback."""

    state: str
    attempts: int
    next_attempt_at: UnixSeconds | None


class JobWithResult(JobObject):
    result: (
        ChatCompletion
        | TextCompletion
        | ResponseObject
        | Embeddings
        | Ranking
        | Scores
        | Classes
        | None
    )
    cost: Cost
    result_url: str | None = Field(description="where a long result can be read without a key")
    callback: CallbackObject | None


def checked_id(job_id: str) -> str:
    """Returns a valid job id. Raises UnknownJob for a malformed one, as for an unknown one."""
    if not _JOB_ID.fullmatch(job_id):
        raise UnknownJob(job_id[:64])
    return job_id


JobIdPath = Annotated[str, Path(json_schema_extra={"pattern": f"^{_JOB_ID.pattern}$"})]


async def job_id_of(job_id: JobIdPath) -> str:
    return checked_id(job_id)


JobId = Annotated[str, Depends(job_id_of)]


def events_url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}/events"


def place(position: QueuePosition | None) -> dict[str, Any]:
    """The number of jobs ahead and the seconds until the job starts; null if it does not wait or
    nothing is known."""
    if position is None:
        return {"position": None, "eta_s": None}
    eta_s = None if position.eta_s is None else round(position.eta_s, 1)
    return {"position": position.num_jobs_ahead, "eta_s": eta_s}


def worker_wait_fields(wait: WorkerWait | None) -> dict[str, Any]:
    """Both null where a worker lives, or the job does not wait."""
    if wait is None:
        return {"waiting_for": None, "expected_start_s": None}
    expected_s = None if wait.expected_s is None else round(wait.expected_s, 1)
    return {"waiting_for": "worker", "expected_start_s": expected_s}


def submitted_object(
    job: Job,
    submitted: Submitted,
    status: JobStatus,
    wait: WorkerWait | None,
    start_ms: float | None,
) -> AcceptedJob:
    """The response to a submission. If an earlier job was found, its position is not known."""
    position = submitted.position if submitted.is_new else None
    return AcceptedJob(**_shown(job, status, job.lane, position, wait, start_ms))


def accepted_object(view: JobView, wait: WorkerWait | None) -> AcceptedJob:
    """The object of a call that has become a job."""
    return AcceptedJob(**_shown_view(view, wait))


def has_result(view: JobView) -> bool:
    """Whether there is an answer to show: also the output of an interrupted job; vectors only if
    all are there. A response states itself how it ended."""
    if view.job.pooling is not None:
        return view.status is JobStatus.SUCCEEDED
    is_told = view.num_output_tokens > 0 or view.job.endpoint is Endpoint.RESPONSES
    return view.is_terminal and is_told


def accepted_response(shown: AcceptedJob, headers: Mapping[str, str]) -> Response:
    """202 with a `location` header."""
    own = {"x-job-id": shown.id, "location": f"/v1/jobs/{shown.id}"}
    return json_response(shown.model_dump(), status=202, headers={**headers, **own})


def job_object(
    view: JobView,
    members: Sequence[MemberObject] = (),
    wait: WorkerWait | None = None,
) -> JobObject:
    """Returns the object of a job. `members`: the calls of a flow."""
    num_tokens = view.num_prompt_tokens, view.num_output_tokens, view.num_cached_tokens
    if view.job.flow is not None and members:
        num_tokens = _sums(members)
    return JobObject(
        **_shown_view(view, wait),
        tenant=view.job.tenant,
        attempt=view.attempt,
        runs=[
            RunObject(
                worker=run.worker.rpartition("-")[2],
                started_at=run.claimed_ms / 1000,
                after_event=run.first_number - 1,
                marks=[_mark(mark) for mark in run.marks],
            )
            for run in view.runs
        ],
        metadata=dict(view.metadata),
        usage=Usage(**usage(view.job, *num_tokens)),
        timings=_timings(view),
        predicted_wait_s=_seconds(view.predicted_wait_ms),
        wait_s=_seconds(view.wait_ms),
        error=JobError(code=view.code, message=view.message) if view.code else None,
        resume=view.job.resume,
        parent=view.job.parent or None,
        members=list(members) or None,
    )


def _mark(mark: JobMark) -> MarkObject:
    return MarkObject(
        kind=mark.kind,
        started_at=mark.begun_ms / 1000,
        ended_at=mark.ended_ms / 1000,
        times=mark.num,
        tokens=mark.num_tokens,
    )


def member_object(job: Job, member: TreeCall, prices: Mapping[str, float]) -> MemberObject:
    """A call of `job`. `prices`: of a million output tokens, by model."""
    run, view = member.run, member.view
    calls = [member_object(job, each, prices) for each in member.calls]
    status = run.status or JobStatus.CLAIMED
    num_tokens = run.prompt_tokens, run.output_tokens, run.cached_tokens
    if view is not None:
        status = view.status
        num_tokens = view.num_prompt_tokens, view.num_output_tokens, view.num_cached_tokens
        num_tokens = _sums(calls) if calls else num_tokens
    used = Usage(**usage(job, *num_tokens))
    fields: dict[str, Any] = {
        "model": run.model,
        "job_id": run.job_id,
        "status": public_status(status),
        "usage": used,
        "timings": None if view is None else _timings(view),
        "cost": cost_of(run.model, used, calls, prices),
        "members": calls or None,
    }
    return MemberObject(**fields)


def cost_of(
    model: str, used: Usage, calls: Sequence[MemberObject], prices: Mapping[str, float]
) -> float | None:
    """What a job cost: the sum of its calls, where it has some."""
    if not calls:
        return used.completion_tokens * prices[model] / 1e6 if model in prices else None
    costs = [call.cost for call in calls]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def _sums(calls: Sequence[MemberObject]) -> tuple[int, int, int]:
    """Prompt, output and cached tokens."""
    used = [call.usage for call in calls]
    return (
        sum(u.prompt_tokens for u in used),
        sum(u.completion_tokens for u in used),
        sum(u.prompt_tokens_details.cached_tokens for u in used),
    )


def _timings(view: JobView) -> Timings:
    return Timings(
        queued_at=_seconds(view.created_ms),
        started_at=_seconds(view.claimed_ms),
        first_token_at=_seconds(view.first_token_ms),
        finished_at=_seconds(view.finished_ms),
        deadline_at=_seconds(view.deadline_ms),
    )


def callback_object(found: CallbackState | None) -> dict[str, Any] | None:
    """The state of the job's callback; None if it has none."""
    if found is None:
        return None
    return {
        "state": found.state,
        "attempts": found.num_attempts,
        "next_attempt_at": _seconds(found.next_attempt_ms),
    }


def _shown_view(view: JobView, wait: WorkerWait | None) -> dict[str, Any]:
    return _shown(view.job, view.status, view.lane, view.position, wait, view.start_ms)


def _shown(
    job: Job,
    status: JobStatus,
    lane: str,
    position: QueuePosition | None,
    wait: WorkerWait | None,
    start_ms: float | None,
) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": public_status(status),
        "endpoint": job.endpoint,
        "model": job.named_model,
        "lane": lane,
        **place(position),
        "start_at": _seconds(start_ms),
        **worker_wait_fields(wait),
        "events_url": events_url(job.id),
    }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
