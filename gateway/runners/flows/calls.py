"""A flow's calls of other models: jobs with ids of their own kind, which begin once and are
followed to their ends.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Self

import msgspec
from msgspec.structs import replace
from pydantic import Field, TypeAdapter, ValidationError

from contract.api_keys import KeyTerms
from contract.errors import BatchwayError, BrokerUnavailable, ErrorCode, JobRefused
from contract.events import End, LogEntry, MemberRun, Prompt, Tokens
from contract.function_types import Submission
from contract.jobs import Endpoint, Job, JobStatus
from contract.payloads.store import PayloadError, PayloadLost
from gateway.follow.follow import Ended, follow
from gateway.http.errors import CONTEXT_EXCEEDED, ApiError, UnknownJob
from gateway.http.handlers import translated
from gateway.prepare.admission import Terms
from gateway.prepare.auth import Caller
from gateway.prepare.calls import prepare_call
from gateway.prepare.job_bodies import CallBody, CallJob
from gateway.redis.cursor import Reset
from gateway.state import Gateway
from gateway.turns import Busy

_MIN_DEADLINE_S = 0.1  # of a call that begins when its flow's time is up
_ASKED: TypeAdapter[CallJob] = TypeAdapter(Annotated[CallJob, Field(discriminator="endpoint")])


class Call(msgspec.Struct, frozen=True):
    """A call of a model. `number`: its number among the flow's calls; `name`: of a pipeline's step;
    `can_fail`: others can answer in its place."""

    number: int
    model: str
    endpoint: Endpoint
    body: Mapping[str, object]
    name: str = ""
    can_fail: bool = False

    def job_id(self, parent_id: str) -> str:
        """The id of the call's job, the same in each run of the flow's job."""
        digest = hashlib.sha256(f"{parent_id}/{self.number}/{self.model}".encode()).hexdigest()
        return f"{parent_id.rpartition('-')[0]}-{digest[:32]}"

    def run(self, parent_id: str) -> MemberRun:
        """The entry of the flow's log for the begin of this call."""
        return MemberRun(self.model, self.job_id(parent_id), name=self.name)


class Outcome(msgspec.Struct, frozen=True):
    """A call that has ended, with its output. It has no job if the call could not be made."""

    run: MemberRun
    job: Job | None = None
    message: str = ""
    events: tuple[Prompt | Tokens, ...] = ()

    @property
    def has_succeeded(self) -> bool:
        return self.run.status is JobStatus.SUCCEEDED


class MemberFailed(Exception):
    """A call failed, and with it the flow. `code`: an ErrorCode; `message`: begins with the name of
    the step or model."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code = code
        self.message = message

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        return cls(outcome.run.code, f"{outcome.run.name or outcome.run.model}: {outcome.message}")


class Calls:
    """The calls of one flow's job. Its `lane` and `deadline_s` (the broker's clock) may change."""

    def __init__(
        self,
        gateway: Gateway,
        parent: Job,
        *,
        lane: str,
        deadline_s: float,
    ) -> None:
        self.gateway = gateway
        self.broker = gateway.broker
        self.parent = parent
        self.lane = lane
        self.deadline_s = deadline_s
        assert parent.flow is not None
        self._flow = parent.flow

    async def prepare(self, call: Call) -> tuple[Job, Submission]:
        """Returns the job of a call in the name of the parent's tenant, whose meter counts its
        tokens. Raises ApiError, TemplateFailed, ModelUnreadable."""
        deadline_s = max(_MIN_DEADLINE_S, self.deadline_s - self.broker.clock())
        key = KeyTerms(
            tenant=self.parent.tenant,
            weight=self.parent.weight,
            tokens_per_minute=self._flow.tokens_per_min,
        )
        terms = Terms(
            job_id=call.job_id(self.parent.id),
            caller=Caller(key, ""),
            deadline_s=deadline_s,
            # Kept as long as the parent's output, whenever the parent ends.
            retention_s=deadline_s + self._flow.retention_s,
            lane=self.lane,
            metadata=self._flow.metadata,
        )
        job, submission = await prepare_call(
            self.gateway,
            call.endpoint,
            parse_body(call.endpoint, {**call.body, "model": call.model}),
            terms,
        )
        return replace(job, parent=self.parent.id), submission

    async def known(self, call: Call) -> Job | None:
        """Returns the job of a call that an earlier run of the flow may have begun."""
        try:
            view, _ = await self.broker.read(call.job_id(self.parent.id), self.parent.tenant)
        except UnknownJob:
            return None
        return view.job

    async def begin(self, call: Call) -> tuple[Job, float | None]:
        """Submits a call's job, unless that was done before. Returns the job, and the time if it
        was submitted here. Raises BatchwayError."""
        job, submission = await self.prepare(call)
        unbound = replace(
            submission,
            lane_bound_tokens=0,
            lane_bound_s=0.0,
            max_stored_bytes=0,
            max_tenant_stored_bytes=0,
            needs_worker=call.can_fail and self._flow.needs_worker,
            metadata={},
        )
        submitted_s = self.broker.clock()
        submitted = await self.broker.submit(job, unbound)
        return job, submitted_s if submitted.is_new else None

    async def follow(
        self, call: Call, job: Job, submitted_s: float | None
    ) -> AsyncIterator[Prompt | Tokens | Outcome]:
        """Yields a call's output from its first event on, and then its outcome. `submitted_s`: when
        it was submitted (the broker's clock); None: earlier."""
        try:
            events = follow(self.gateway, job, submitted_s=submitted_s, ends_with_drain=False)
            async for item in events:
                match item:
                    case Ended(end):
                        yield Outcome(_ended(call, self.parent.id, end), job, _why(end))
                    case LogEntry(event=(Prompt() | Tokens()) as event):
                        yield event
                    case Reset():  # Redis lost a part of the log: from the start
                        raise BrokerUnavailable("the log of a call was replaced")
        except PayloadLost as exc:
            yield failed(call, self.parent.id, exc)


def parse_body(endpoint: Endpoint, fields: Mapping[str, object]) -> CallBody:
    """A body that a flow has made. Raises ApiError."""
    asked = {"endpoint": endpoint.value, "body": fields}
    try:
        return _ASKED.validate_json(msgspec.json.encode(asked)).body
    except ValidationError as exc:
        error = exc.errors(include_input=False, include_url=False)[0]
        # Without the endpoint, by which pydantic chose the body's class.
        raise translated({**error, "loc": error["loc"][1:] or ("body",)}, fields) from None


def failed(call: Call, parent_id: str, exc: BatchwayError) -> Outcome:
    """The outcome of a call that could not begin. Raises `exc` again if a retry may help."""
    match exc:
        case ApiError() if exc.status == 503:
            raise exc
        case ApiError():
            is_long = exc.code == CONTEXT_EXCEEDED
            code = ErrorCode.PROMPT_TOO_LONG if is_long else ErrorCode.BAD_PARAMETER
            message = exc.message
        case JobRefused():
            code, message = exc.code, exc.message
        case PayloadLost():
            code, message = ErrorCode.PAYLOAD_LOST, "its output is lost"
        case BrokerUnavailable() | PayloadError() | Busy():
            raise exc
        case _:
            code, message = ErrorCode.ENGINE_ERROR, str(exc)
    run = replace(call.run(parent_id), status=JobStatus.FAILED, code=code)
    return Outcome(run, message=message)


def _ended(call: Call, parent_id: str, end: End) -> MemberRun:
    code = {
        JobStatus.SUCCEEDED: "",
        JobStatus.FAILED: end.code or ErrorCode.ENGINE_ERROR,
        JobStatus.EXPIRED: ErrorCode.DEADLINE,
        JobStatus.CANCELLED: ErrorCode.ENGINE_ERROR,
    }[end.status]
    return replace(
        call.run(parent_id),
        status=end.status,
        prompt_tokens=end.prompt_tokens,
        output_tokens=end.output_tokens,
        code=code,
    )


def _why(end: End) -> str:
    return end.message or ("" if end.status is JobStatus.SUCCEEDED else f"its job is {end.status}")
