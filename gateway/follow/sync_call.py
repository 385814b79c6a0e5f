"""A synchronous call: its job is cancelled with the caller, until the call becomes a job. The
`Prefer` header (RFC 7240) or the platform limits how long it may last before that."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator

import msgspec
from fastapi import Request

from contract.errors import BatchwayError
from contract.events import Members
from contract.jobs import Job
from gateway.follow.job_objects import accepted_object, accepted_response
from gateway.follow.members import MODELS_HEADER, KnownMembers, cancel_whole
from gateway.http.errors import to_call_error
from gateway.http.sse import AnsweredOtherwise
from gateway.settings import GatewaySettings
from gateway.state import Gateway

TIME_LEFT = "time_left_s"  # key in the request's state: seconds until the platform ends the request

log = logging.getLogger("batchway.gateway")


class Patience(msgspec.Struct, frozen=True):
    """The time (`time.monotonic`) until which a call may last; `inf`: unlimited."""

    result_by_s: float = math.inf  # by the client's wish; does not end a stream that has begun
    answer_by_s: float = math.inf  # by the platform, which ends the request then

    @classmethod
    def of(
        cls, request: Request, settings: GatewaySettings, wait_s: float | None = None
    ) -> "Patience":
        """Computes the time limit. `wait_s`: the client's wish; a call's deadline limits it."""
        now_s, platform_s = time.monotonic(), request.scope["state"].get(TIME_LEFT, math.inf)
        result_s = math.inf if wait_s is None else min(wait_s, settings.sync_deadline_s)
        return cls(now_s + result_s, now_s + min(settings.sync_limit_s or math.inf, platform_s))

    def is_over(self, *, has_sent: bool) -> bool:
        """Whether the call must become a job now."""
        now_s = time.monotonic()
        return now_s >= self.answer_by_s or (now_s >= self.result_by_s and not has_sent)

    @property
    def is_wished(self) -> bool:
        """Whether the response must not begin before the result or the end of the wait."""
        return self.result_by_s < math.inf


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
    """One call. `submitted_s`: when its job was submitted (monotonic); None if it existed before.
    `may_return`: the caller sent an Idempotency-Key and may come back. `job_retention_s`: how long
    the output is kept if the call becomes a job."""

    def __init__(
        self,
        gateway: Gateway,
        job: Job,
        patience: Patience,
        timing: ServerTiming,
        *,
        job_retention_s: float,
        submitted_s: float | None,
        may_return: bool,
        headers: dict[str, str],
    ) -> None:
        self.gateway = gateway
        self.job = job
        self.patience = patience
        self.timing = timing
        self.submitted_s = submitted_s
        self._broker = gateway.broker
        self._job_retention_s = job_retention_s
        self._goes_on = may_return
        self.headers = headers  # of the answer
        self._members = KnownMembers()

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
        self._members.add(event)
        self.headers |= self._members.header()

    async def detach(self) -> None:
        """Turns the call into a job, which needs no caller. Raises BatchwayError."""
        await self._broker.detach(
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
        view, _ = await self._broker.read(self.job.id, self.job.tenant)
        wait = await self._broker.worker_wait(view.job, view.status)
        return AnsweredOtherwise(accepted_response(accepted_object(view, wait), self.headers))

    async def on_gone(self) -> None:
        """The caller has disconnected: cancels the job, unless it does not need a caller."""
        if self._goes_on:
            return
        try:
            status = await cancel_whole(self._broker, self.job)
        except BatchwayError as exc:
            log.warning(
                "caller gone, not cancelled (%s) job_id=%s", type(exc).__name__, self.job.id
            )
            return
        log.info("caller gone, job is %s job_id=%s lane=%s", status, self.job.id, self.job.lane)
