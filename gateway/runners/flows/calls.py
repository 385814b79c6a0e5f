"""A flow's calls of other models: jobs with ids of their own kind, which begin once and are
followed to their ends; and one run of a flow's job, with what is logged of its calls.

The log of a flow depends only on its own job and the logs of its calls. A run that begins again
gives the same events in the same order.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Self

import msgspec
from msgspec.structs import replace
from pydantic import Field, TypeAdapter, ValidationError

from contract.api_keys import KeyTerms
from contract.connection import end_tasks
from contract.errors import BatchwayError, BrokerUnavailable, ErrorCode, JobRefused
from contract.events import ChoiceDelta, End, LogEntry, MemberRun, Members, Prompt, Tokens
from contract.function_types import Submission
from contract.jobs import Endpoint, Job, JobStatus
from contract.payloads.store import PayloadError, PayloadLost
from gateway.follow.streams import follow
from gateway.http.errors import CONTEXT_EXCEEDED, ApiError, UnknownJob
from gateway.http.handlers import translated
from gateway.prepare.admission import Caller
from gateway.prepare.calls import prepare_call
from gateway.prepare.job_bodies import CallBody, CallJob
from gateway.redis.hints import Reset
from gateway.runners.flows.stage_queues import StageQueues
from gateway.state import Gateway
from gateway.turns import Busy

_MIN_DEADLINE_S = 0.1  # of a call that begins when its flow's time is up
_ASKED: TypeAdapter[CallJob] = TypeAdapter(Annotated[CallJob, Field(discriminator="endpoint")])

Output = Prompt | Tokens
_OTHER_SHAPE = "its answer has another number of choices or inputs than the call"
_FORGOTTEN = "its output is no longer kept, and the flow could not go on without it"


class ModelCall(msgspec.Struct, frozen=True):
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


class CallOutcome(msgspec.Struct, frozen=True):
    """A call that has ended, with its output. It has no job if the call could not be made."""

    run: MemberRun
    job: Job | None = None
    message: str = ""
    events: tuple[Prompt | Tokens, ...] = ()

    @property
    def has_succeeded(self) -> bool:
        return self.run.status is JobStatus.SUCCEEDED

    @property
    def num_choices(self) -> int:
        assert self.job is not None
        return self.job.num_choices

    def deltas(self) -> Iterator[ChoiceDelta]:
        """Yields all parts of the output."""
        for event in self.events:
            yield from event.deltas if isinstance(event, Tokens) else ()


class MemberFailed(Exception):
    """A call failed, and with it the flow. `code`: an ErrorCode; `message`: begins with the name of
    the step or model."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code = code
        self.message = message

    @classmethod
    def of(cls, outcome: CallOutcome) -> Self:
        return cls(outcome.run.code, f"{outcome.run.name or outcome.run.model}: {outcome.message}")


class ModelCalls:
    """The calls of one flow's job. Its `lane` and `deadline_s` (the broker's clock) may change."""

    def __init__(self, gateway: Gateway, parent: Job, *, lane: str, deadline_s: float) -> None:
        self.gateway = gateway
        self.parent = parent
        self.lane = lane
        self.deadline_s = deadline_s
        assert parent.flow is not None
        self._flow = parent.flow

    async def prepare(self, call: ModelCall) -> tuple[Job, Submission]:
        """Returns the job of a call in the name of the parent's tenant, whose meter counts its
        tokens. Raises ApiError, TemplateFailed, ModelUnreadable."""
        deadline_s = max(_MIN_DEADLINE_S, self.deadline_s - self.gateway.broker.clock())
        key = KeyTerms(
            tenant=self.parent.tenant,
            weight=self.parent.weight,
            tokens_per_minute=self._flow.tokens_per_min,
        )
        caller = Caller(key, "")
        body = parse_body(call.endpoint, {**call.body, "model": call.model})
        job = caller.job(call.endpoint, body, self.lane, call.job_id(self.parent.id))
        submission = caller.submission(
            deadline_s=deadline_s,
            # Kept as long as the parent's output, whenever the parent ends.
            retention_s=deadline_s + self._flow.retention_s,
            metadata=self._flow.metadata,
            priority=self._flow.priority,
        )
        job = replace(job, session=self.parent.session or self.parent.id)
        job, submission = await prepare_call(self.gateway, body, job, submission)
        return replace(job, parent=self.parent.id), submission


def parse_body(endpoint: Endpoint, fields: Mapping[str, object]) -> CallBody:
    """A body that a flow has made. Raises ApiError."""
    asked = {"endpoint": endpoint.value, "body": fields}
    try:
        return _ASKED.validate_json(msgspec.json.encode(asked)).body
    except ValidationError as exc:
        error = exc.errors(include_input=False, include_url=False)[0]
        # Without the endpoint, by which pydantic chose the body's class.
        raise translated({**error, "loc": error["loc"][1:] or ("body",)}, fields) from None


def failed(call: ModelCall, parent_id: str, exc: BatchwayError) -> CallOutcome:
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
    return CallOutcome(run, message=message)


def _ended(call: ModelCall, job: Job, end: End) -> CallOutcome:
    code = {
        JobStatus.SUCCEEDED: "",
        JobStatus.FAILED: end.code or ErrorCode.ENGINE_ERROR,
        JobStatus.EXPIRED: ErrorCode.DEADLINE,
        JobStatus.CANCELLED: ErrorCode.ENGINE_ERROR,
    }[end.status]
    num_tokens = end.prompt_tokens, end.output_tokens
    run = MemberRun(call.model, job.id, end.status, *num_tokens, code, call.name, end.cached_tokens)
    why = "" if end.status is JobStatus.SUCCEEDED else f"its job is {end.status}"
    return CallOutcome(run, job, end.message or why)


class Execution:
    """One run. `known`: calls that are already in the log, by job id. `stages`: those of a staged
    pipeline."""

    def __init__(
        self, calls: ModelCalls, known: Mapping[str, MemberRun], stages: StageQueues | None
    ) -> None:
        self.stages = stages
        self.calls = calls
        self.parent = calls.parent
        self.begun: dict[str, MemberRun] = {}  # by job id, as they are now
        self._known = known
        self._unlogged: list[MemberRun] = []

    def log_begun(self, *calls: ModelCall) -> Members:
        """The event that these calls begin, with the calls that have ended meanwhile."""
        for call in calls:
            self._note(call.run(self.parent.id))
        return self.take_unlogged()

    def take_unlogged(self) -> Members:
        """Returns an event with all that is not in the log yet."""
        event = Members(tuple(self._unlogged))
        self._unlogged = []
        return event

    @property
    def has_unlogged(self) -> bool:
        return bool(self._unlogged)

    def unfinished(self) -> list[MemberRun]:
        """The calls that have begun and not ended, as far as this run or the log shows."""
        runs = {**self._known, **self.begun}.values()
        return [run for run in runs if run.status is None]

    def num_tokens(self) -> tuple[int, int, int]:
        """Prompt, output and cached tokens of all calls that have ended."""
        runs = self.begun.values()
        return (
            sum(run.prompt_tokens for run in runs),
            sum(run.output_tokens for run in runs),
            sum(run.cached_tokens for run in runs),
        )

    def _note(self, run: MemberRun) -> None:
        self.begun[run.job_id] = run
        self._unlogged.append(run)

    async def run_call(self, call: ModelCall) -> CallOutcome:
        """Makes a call, and returns it with all its output."""
        outcome = await self._collected(call)
        self._note(outcome.run)
        return outcome

    async def run_calls(self, calls: Sequence[ModelCall]) -> list[CallOutcome]:
        """Makes calls at once. Their ends are logged in the order of the calls."""
        # Not a task group, which passes a cancellation on once only: redis-py may lose it.
        tasks = [asyncio.create_task(self._collected(call)) for call in calls]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
        for outcome in outcomes:
            self._note(outcome.run)
        return outcomes

    async def _collected(self, call: ModelCall) -> CallOutcome:
        events: list[Output] = []
        outcome: CallOutcome | None = None
        async for item in self._follow(call):
            if isinstance(item, CallOutcome):
                outcome = item
            else:
                events.append(item)
        assert outcome is not None
        return replace(outcome, events=tuple(events))

    async def stream_call(self, call: ModelCall) -> AsyncIterator[Output]:
        """Makes the call that decides, and yields its output as it comes. Raises MemberFailed."""
        outcome: CallOutcome | None = None
        async for item in self._follow(call):
            if isinstance(item, CallOutcome):
                outcome = item
                continue
            for event in self.visible([item]):
                yield event
        assert outcome is not None
        self._note(outcome.run)
        if not outcome.has_succeeded:
            raise MemberFailed.of(outcome)

    def visible(self, events: Sequence[Output]) -> list[Output]:
        """Converts a call's output to the flow's, without what the flow's caller did not ask for.
        Raises MemberFailed if it has another shape."""
        params, found = self.parent.params, list[Output]()
        for event in events:
            if isinstance(event, Prompt):
                found += [event] if params.prompt_logprobs is not None else []
                continue
            if any(delta.choice >= self.parent.num_choices for delta in event.deltas):
                raise MemberFailed(ErrorCode.BAD_PARAMETER, f"{self.parent.model}: {_OTHER_SHAPE}")
            deltas = event.deltas
            if params.logprobs is None:
                deltas = tuple(replace(delta, logprobs=None) for delta in deltas)
            found.append(Tokens(deltas))
        return found

    async def _follow(self, call: ModelCall) -> AsyncIterator[Output | CallOutcome]:
        """Yields a call's output from its first event on, and then its outcome."""
        calls, run = self.calls, self._known.get(call.job_id(self.parent.id))
        if run is not None and run.status not in (None, JobStatus.SUCCEEDED):
            yield CallOutcome(run, message="it has failed before")
            return
        job, submitted_s = None, None
        try:
            if run is not None:
                with suppress(UnknownJob):
                    view, _ = await calls.gateway.broker.read(run.job_id, self.parent.tenant)
                    job = view.job
            if job is None and run is not None and run.status is not None:
                lost = replace(run, status=JobStatus.FAILED, code=ErrorCode.RETRIES)
                yield CallOutcome(lost, message=_FORGOTTEN)
                return
            if job is None:
                job, submitted_s = await self._begin(call)
        except BatchwayError as exc:
            yield failed(call, self.parent.id, exc)
            return
        try:
            events = follow(calls.gateway, job, submitted_s=submitted_s, ends_with_drain=False)
            async for news in events:
                match news:
                    case LogEntry(event=End() as end):
                        yield _ended(call, job, end)
                    case [*entries]:
                        for entry in entries:
                            if isinstance(entry.event, Prompt | Tokens):
                                yield entry.event
                    case Reset():  # Redis lost a part of the log: from the start
                        raise BrokerUnavailable("the log of a call was replaced")
        except PayloadLost as exc:
            yield failed(call, self.parent.id, exc)

    async def _begin(self, call: ModelCall) -> tuple[Job, float | None]:
        """Submits a call's job, unless an earlier run has done so. Returns the job, and the time if
        it was submitted here (the broker's clock)."""
        broker, (job, submission) = self.calls.gateway.broker, await self.calls.prepare(call)
        assert self.parent.flow is not None
        unbound = replace(
            submission,
            lane_bound_tokens=0,
            lane_bound_s=0.0,
            max_stored_bytes=0,
            max_tenant_stored_bytes=0,
            needs_worker=call.can_fail and self.parent.flow.needs_worker,
            metadata={},
        )
        submitted_s = broker.clock()
        submitted = await broker.submit(job, unbound)
        return job, submitted_s if submitted.is_new else None
