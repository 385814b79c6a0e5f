"""A synchronous call: its job is cancelled with the caller, until the call becomes a job."""

import logging

from contract.errors import BatchwayError
from contract.events import Members
from contract.jobs import Job
from gateway.follow.job_objects import accepted_object, accepted_response
from gateway.follow.members import KnownMembers, cancel_whole
from gateway.follow.patience import Patience
from gateway.http.load_headers import ServerTiming
from gateway.http.sse import AnsweredOtherwise
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")


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
