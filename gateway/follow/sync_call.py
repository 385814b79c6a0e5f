"""A synchronous call: its job is cancelled with the caller, until the call becomes a job. The
`Prefer` header (RFC 7240) or the platform limits how long it may last before that."""

import contextlib
import logging
import math
import re
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Query, Request

from contract.errors import BatchwayError
from contract.events import ChoiceDelta, Members
from contract.function_types import Submitted
from contract.jobs import Job
from gateway.follow.job_objects import accepted_object, accepted_response
from gateway.follow.members import MODELS_HEADER, KnownMembers, cancel_whole, chosen_header
from gateway.http.errors import UnknownJob, rate_headers, to_call_error
from gateway.http.sse import AnsweredOtherwise
from gateway.settings import GatewaySettings
from gateway.state import Gateway

TIME_LEFT = "time_left_s"  # key in the request's state: seconds until the platform ends the request

log = logging.getLogger("batchway.gateway")

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")


class TimeLimit(msgspec.Struct, frozen=True):
    """How long a caller waits, by its `Prefer` header and by the platform; `inf`: without limit."""

    is_async: bool = False  # the caller accepts a job
    wait_s: int | None = None  # seconds, after which it wants the job
    result_by_s: float = math.inf  # `time.monotonic`, by `wait_s`; ends no stream that has begun
    answer_by_s: float = math.inf  # `time.monotonic`, when the platform ends the request
    may_become_job: bool = False
    wants_job: bool = False  # the response is 202, without waiting

    @classmethod
    def of(
        cls,
        request: Request,
        settings: GatewaySettings,
        *,
        is_async: bool = False,
        wait_s: int | None = None,
    ) -> "TimeLimit":
        """Computes the times. A call's deadline limits `wait_s`."""
        now_s, platform_s = time.monotonic(), request.scope["state"].get(TIME_LEFT, math.inf)
        result_s = math.inf if wait_s is None else min(wait_s, settings.sync_deadline_s)
        answer_s = min(settings.sync_limit_s or math.inf, platform_s)
        return cls(
            is_async,
            wait_s,
            now_s + result_s,
            now_s + answer_s,
            may_become_job=is_async or wait_s is not None,
            wants_job=is_async and wait_s is None,
        )

    def headers(self) -> dict[str, str]:
        """The `Preference-Applied` header; wishes other than about waiting are ignored."""
        parts = ["respond-async"] if self.is_async else []
        parts += [] if self.wait_s is None else [f"wait={self.wait_s}"]
        return {"preference-applied": ", ".join(parts)} if parts else {}

    def is_over(self, *, has_sent: bool) -> bool:
        """Whether the call must become a job now."""
        now_s = time.monotonic()
        return now_s >= self.answer_by_s or (now_s >= self.result_by_s and not has_sent)


async def time_limit_of(
    request: Request,
    prefer: Annotated[
        list[str] | None,
        Header(description="`respond-async`: 202 at once; `wait=20`: 202 after 20 s"),
    ] = None,
) -> TimeLimit:
    words = ",".join(prefer or ()).lower().split(",")
    parts = [word.partition(";")[0].strip() for word in words]
    waits = [match for part in parts if (match := _WAIT.fullmatch(part))]
    settings: GatewaySettings = request.app.state.settings
    wait_s = int(waits[0][1]) if waits else None
    return TimeLimit.of(request, settings, is_async="respond-async" in parts, wait_s=wait_s)


class LogPosition(msgspec.Struct, frozen=True):
    """The number of the last event that a client has, and the log's hash at that event if known."""

    number: int = 0
    hash: str | None = None

    @property
    def sse_id(self) -> str:
        return f"{self.number}.{self.hash}" if self.hash else str(self.number)


START = LogPosition()
_PATTERN = r"^([0-9]{1,9}(\.[0-9a-f]{8})?)?$"


async def asked_position(
    last_event_id: Annotated[
        str,
        Header(
            alias="Last-Event-ID", pattern=_PATTERN, description="go on with a stream after this"
        ),
    ] = "",
    starting_after: Annotated[
        str, Query(pattern=_PATTERN, description="the same as Last-Event-ID, which wins")
    ] = "",
) -> LogPosition:
    """The position in the request. Raises ApiError if it is malformed."""
    number, _, hash_ = (last_event_id or starting_after).partition(".")
    return LogPosition(int(number), hash_ or None) if number else START


AskedTimeLimit = Annotated[TimeLimit, Depends(time_limit_of)]
AskedPosition = Annotated[LogPosition, Depends(asked_position)]


class ServerTiming:
    """Times of one request in ms from its start, for the header `Server-Timing`."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Records the time of a phase, once."""
        self._marks.setdefault(name, 1000 * (time.monotonic() - self._started_s))

    def headers(self) -> dict[str, str]:
        if not self._marks:
            return {}
        parts = [f"{name};dur={ms:.1f}" for name, ms in self._marks.items()]
        return {"server-timing": ", ".join(parts)}


class SyncCall:
    """One call: how long its caller waits, from which position on it wants the answer, and, once it
    is queued, its job."""

    job: Job
    submitted_s: float | None = None  # when its job was (monotonic); None: it existed before

    def __init__(
        self,
        request: Request,
        gateway: Gateway,
        time_limit: TimeLimit,
        *,
        position: LogPosition = START,
        key: str = "",
    ) -> None:
        """`key`: the Idempotency-Key."""
        self.request = request
        self.gateway = gateway
        self.time_limit = time_limit
        self.position = position
        self.key = key
        self.timing = ServerTiming()
        self.headers = time_limit.headers()  # of the answer
        # What was output, if the next turn is to be warmed.
        is_warmed = gateway.settings.warms_next_turn
        self.deltas: list[ChoiceDelta] | None = [] if is_warmed and position is START else None
        self._members: KnownMembers | None = None  # of a flow
        self._goes_on = False
        self._job_retention_s = 0.0

    def note_queued(
        self,
        job: Job,
        submitted: Submitted,
        *,
        submitted_s: float,
        may_return: bool,
        job_retention_s: float,
    ) -> None:
        """The job of the call. `may_return`: its caller may come back with the key.
        `job_retention_s`: how long the output is kept if the call becomes a job."""
        self.job = job
        self.submitted_s = submitted_s if submitted.is_new else None
        self._goes_on = may_return
        self._job_retention_s = job_retention_s
        self.headers |= {"x-job-id": job.id} | rate_headers(submitted.rates) | chosen_header(job)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raises ApiError for BatchwayError, with the headers that name the job and its models."""
        try:
            yield
        except BatchwayError as exc:
            error = to_call_error(exc)
            names = ("x-job-id", MODELS_HEADER)
            error.headers |= {n: self.headers[n] for n in names if n in self.headers}
            raise error from exc

    def note_members(self, event: Members) -> None:
        """Adds the models that a flow has called to the answer's headers."""
        self._members = self._members or KnownMembers()
        self._members.add(event)
        self.headers |= self._members.header()

    async def detach(self) -> None:
        """Turns the call into a job, which needs no caller. Raises BatchwayError."""
        await self.gateway.broker.detach(
            self.job.id,
            self.job.tenant,
            deadline_s=self.gateway.settings.job_deadline_s,
            retention_s=self._job_retention_s,
        )
        self._goes_on = True
        log.info("call became a job job_id=%s lane=%s", self.job.id, self.job.lane)

    async def hand_over(self) -> AnsweredOtherwise:
        """Turns the call into a job. Returns the exception that answers 202, before any output was
        sent."""
        await self.detach()
        view, _ = await self.gateway.broker.read(self.job.id, self.job.tenant)
        wait = await self.gateway.broker.worker_wait(view.job, view.status)
        return AnsweredOtherwise(accepted_response(accepted_object(view, wait), self.headers))

    async def on_gone(self) -> None:
        """The caller has disconnected: cancels the job, unless it does not need a caller."""
        if self._goes_on:
            return
        try:
            status = await cancel_whole(self.gateway.broker, self.job)
        except UnknownJob:
            return  # it has ended and is forgotten
        except BatchwayError as exc:
            log.warning(
                "caller gone, not cancelled (%s) job_id=%s", type(exc).__name__, self.job.id
            )
            return
        log.info("caller gone, job is %s job_id=%s lane=%s", status, self.job.id, self.job.lane)
