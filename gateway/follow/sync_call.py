"""A synchronous call: its job is cancelled with the caller, until the call becomes a job. The
`Prefer` header (RFC 7240) or the platform limits how long it may last before that."""

import logging
import math
import re
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Request

from contract.errors import BatchwayError
from contract.events import Members
from contract.jobs import Job
from gateway.follow.job_objects import accepted_object, accepted_response
from gateway.follow.members import KnownMembers, cancel_whole
from gateway.http.errors import ServerTiming
from gateway.http.sse import AnsweredOtherwise
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")
TIME_LEFT = "time_left_s"  # key in the request's state: seconds until the platform ends the request

log = logging.getLogger("batchway.gateway")


class Preference(msgspec.Struct, frozen=True):
    """The `Prefer` header's wishes about waiting. Others are ignored, as the RFC says."""

    is_async: bool = False
    wait_s: int | None = None

    @classmethod
    def of(cls, headers: Sequence[str]) -> "Preference":
        words = ",".join(headers).lower().split(",")
        parts = [word.partition(";")[0].strip() for word in words]
        waits = [match for part in parts if (match := _WAIT.fullmatch(part))]
        return cls("respond-async" in parts, int(waits[0][1]) if waits else None)

    @property
    def is_given(self) -> bool:
        return self.is_async or self.wait_s is not None

    @property
    def is_at_once(self) -> bool:
        """Whether the response is 202 without waiting."""
        return self.is_async and self.wait_s is None

    def applied(self) -> dict[str, str]:
        """The `Preference-Applied` header."""
        parts = ["respond-async"] if self.is_async else []
        parts += [] if self.wait_s is None else [f"wait={self.wait_s}"]
        return {"preference-applied": ", ".join(parts)} if parts else {}


async def preference_of(
    prefer: Annotated[
        list[str] | None,
        Header(description="`respond-async`: 202 at once; `wait=20`: 202 after 20 s"),
    ] = None,
) -> Preference:
    return Preference.of(prefer or [])


AskedPreference = Annotated[Preference, Depends(preference_of)]


class Patience(msgspec.Struct, frozen=True):
    """The time (`time.monotonic`) until which a call may last; `inf`: unlimited."""

    result_by_s: float = math.inf  # by the client's wish; does not end a stream that has begun
    answer_by_s: float = math.inf  # by the platform, which ends the request then

    @classmethod
    def of(
        cls, request: Request, preference: Preference, *, sync_limit_s: float, longest_s: float
    ) -> "Patience":
        """Computes the time limit. `sync_limit_s` 0: no limit except the platform's, if it reports
        one. A client's wish is limited to `longest_s`."""
        now_s = time.monotonic()
        left_s = min(sync_limit_s or math.inf, request.scope["state"].get(TIME_LEFT, math.inf))
        wait_s = math.inf if preference.wait_s is None else min(preference.wait_s, longest_s)
        return cls(now_s + wait_s, now_s + left_s)

    def is_over(self, *, has_sent: bool) -> bool:
        """Whether the call must become a job now."""
        now_s = time.monotonic()
        return now_s >= self.answer_by_s or (now_s >= self.result_by_s and not has_sent)

    @property
    def is_wished(self) -> bool:
        """Whether the response must not begin before the result or the end of the wait."""
        return self.result_by_s < math.inf


class SyncCall:
    """One call. `submitted_s`: when its job was submitted (monotonic); None if it existed before.
    `may_return`: the caller sent an Idempotency-Key and may come back. `job_retention_s`: how long
    the output is kept if the call becomes a job."""

    def __init__(
        self,
        broker: Broker,
        settings: GatewaySettings,
        job: Job,
        patience: Patience,
        timing: ServerTiming,
        *,
        job_retention_s: float,
        submitted_s: float | None,
        may_return: bool,
        headers: dict[str, str],
    ) -> None:
        self.job = job
        self.patience = patience
        self.timing = timing
        self.submitted_s = submitted_s
        self._broker = broker
        self._settings = settings
        self._job_retention_s = job_retention_s
        self._goes_on = may_return
        self.headers = headers  # of the answer
        self._members = KnownMembers()

    def note_members(self, event: Members) -> None:
        """Adds the models that a flow has called to the answer's headers."""
        self._members.add(event)
        self.headers |= self._members.header()

    async def detach(self) -> None:
        """Turns the call into a job, which needs no caller. Raises BatchwayError."""
        await self._broker.detach(
            self.job.id,
            self.job.tenant,
            deadline_s=self._settings.job_deadline_s,
            retention_s=self._job_retention_s,
        )
        self._goes_on = True
        log.info("call became a job job_id=%s lane=%s", self.job.id, self.job.lane)

    async def hand_over(self) -> AnsweredOtherwise:
        """Turns the call into a job. Returns the exception that answers 202, before any output was
        sent."""
        await self.detach()
        view, _ = await self._broker.read(self.job.id, self.job.tenant)
        return AnsweredOtherwise(accepted_response(accepted_object(view), self.headers))

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
