"""A synchronous call and its job: cancelled with its caller, until it turns into a job of its own.

Leaves what the answer looks like to streams.
"""

import logging
from collections.abc import Mapping

from contract.errors import BatchwayError
from contract.jobs import Job
from gateway.http.load_headers import ServerTiming
from gateway.http.sse import AnsweredOtherwise
from gateway.jobs.job_objects import accepted_object, accepted_response
from gateway.jobs.patience import Patience
from gateway.redis.broker import Broker
from gateway.settings import GatewaySettings

log = logging.getLogger("batchway.gateway")


class SyncCall:
    """One call. `submitted_s`: since when (monotonic) its job may be there, None where it was there
    before. `may_return`: its caller brought an Idempotency-Key, and may come back for it.
    `job_retention_s`: how long its output is kept once it has turned into a job.
    """

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
        headers: Mapping[str, str],
    ) -> None:
        self.job = job
        self.patience = patience
        self.timing = timing
        self.submitted_s = submitted_s
        self._broker = broker
        self._settings = settings
        self._job_retention_s = job_retention_s
        self._goes_on = may_return
        self._headers = headers

    async def detach(self) -> None:
        """Lets the job go on without a caller, under a job's terms. Raises BatchwayError."""
        await self._broker.detach(
            self.job.id,
            self.job.tenant,
            deadline_s=self._settings.job_deadline_s,
            retention_s=self._job_retention_s,
        )
        self._goes_on = True
        log.info("call became a job job_id=%s lane=%s", self.job.id, self.job.lane)

    async def hand_over(self) -> AnsweredOtherwise:
        """What a call raises whose caller has been sent nothing yet: 202 with the job."""
        await self.detach()
        view, _ = await self._broker.read(self.job.id, self.job.tenant)
        return AnsweredOtherwise(accepted_response(accepted_object(view), self._headers))

    async def on_gone(self) -> None:
        """The caller has left: cancels the job, unless it goes on without one."""
        if self._goes_on:
            return
        try:
            status = await self._broker.cancel(self.job.id, self.job.tenant)
        except BatchwayError as exc:
            log.warning(
                "caller gone, not cancelled (%s) job_id=%s", type(exc).__name__, self.job.id
            )
            return
        log.info("caller gone, job is %s job_id=%s lane=%s", status, self.job.id, self.job.lane)
