"""POST /v1/responses from a valid body to its answer."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Self

import msgspec
from fastapi import Request
from starlette.responses import Response

from contract.api_keys import MIN_RETENTION_S
from contract.errors import BatchwayError
from contract.function_types import Submission
from contract.jobs import Endpoint, Job
from contract.response_records import ResponseRecord, decode_record, response_id
from gateway.follow.members import cancel_whole, chosen_header, delete_whole
from gateway.follow.patience import Patience, Preference
from gateway.follow.response_followers import response_stream, whole_response
from gateway.follow.stored_responses import shown_response
from gateway.follow.sync_call import SyncCall
from gateway.http import sse
from gateway.http.errors import to_call_error
from gateway.http.load_headers import ServerTiming, rate_headers
from gateway.prepare.admission import Terms
from gateway.prepare.auth import Caller
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.response_jobs import prepare_response
from gateway.prepare.unsupported import ignored_header
from gateway.routes.accepted_jobs import accepted_job, body_hash
from gateway.runners.submission import submit
from gateway.state import Gateway

log = logging.getLogger("batchway.gateway")


class ResponseCall(msgspec.Struct, frozen=True):
    """A call whose job is ready to be queued."""

    request: Request
    gateway: Gateway
    caller: Caller
    body: ResponseBody
    job: Job
    submission: Submission
    timing: ServerTiming

    @classmethod
    async def prepared(
        cls, request: Request, gateway: Gateway, caller: Caller, body: ResponseBody, key: str
    ) -> Self:
        """Prepares a call. Raises ApiError."""
        hashed = body_hash(key, Endpoint.RESPONSES, await request.json())
        terms = _terms(gateway, caller, body, key, hashed)
        job, submission = await prepare_response(gateway, body, terms)
        return cls(request, gateway, caller, body, job, submission, ServerTiming())

    async def answer(self) -> Response:
        """Queues the job and answers: whole, as a stream, or at once. Raises ApiError."""
        gateway, body = self.gateway, self.body
        submitted_s = gateway.broker.clock()
        submitted = await submit(gateway, self.job, self.submission)
        self.timing.mark("admission")
        job = await accepted_job(gateway, self.job, submitted, self.caller)
        record = decode_record(await gateway.broker.payloads.response(job))
        headers = {"x-job-id": job.id, **ignored_header(body), **rate_headers(submitted.rates)}
        headers |= chosen_header(job)
        if body.background and not body.stream:
            shown = await shown_response(gateway, response_id(job), job.tenant)
            return sse.json_response(shown, headers={**headers, **self.timing.headers()})
        call = self._call(job, submitted_s if submitted.is_new else None, headers)
        try:
            return await (self._stream if body.stream else self._whole)(call, record)
        except BatchwayError as exc:
            error = to_call_error(exc)
            error.headers["x-job-id"] = job.id
            raise error from exc

    def _call(self, job: Job, submitted_s: float | None, headers: dict[str, str]) -> SyncCall:
        gateway, settings = self.gateway, self.gateway.settings
        patience = Patience.of(
            self.request,
            Preference(),
            sync_limit_s=settings.sync_limit_s,
            longest_s=settings.sync_deadline_s,
        )
        return SyncCall(
            gateway.broker,
            settings,
            job,
            patience,
            self.timing,
            job_retention_s=self.caller.job_retention_s(settings),
            submitted_s=submitted_s,
            may_return=not self.submission.attendance_s,
            headers=headers,
        )

    async def _whole(self, call: SyncCall, record: ResponseRecord) -> Response:
        work = whole_response(self.gateway, call, record)
        try:
            response = await sse.unless_gone(self.request.receive, work)
        except sse.ClientGone:
            await call.on_gone()
            return Response(status_code=499)  # the client never sees this
        finally:
            await self._forget_unstored(call)
        call.timing.mark("total")
        return sse.json_response(response, headers=call.headers | call.timing.headers())

    async def _stream(self, call: SyncCall, record: ResponseRecord) -> Response:
        headers = call.headers | call.timing.headers()

        async def events() -> AsyncGenerator[bytes, None]:
            stream = response_stream(self.gateway, call.job, record, after=-1, call=call)
            async with contextlib.aclosing(stream):
                async for part in stream:
                    yield part
            await self._forget_unstored(call)

        async def on_gone() -> None:
            await call.on_gone()
            await self._forget_unstored(call)

        return await sse.sse_response(self.request, events(), headers=headers, on_gone=on_gone)

    async def _forget_unstored(self, call: SyncCall) -> None:
        """Deletes a response with `store: false`. If that fails, its short retention ends it."""
        if self.body.is_stored:
            return
        job, broker = call.job, self.gateway.broker
        try:
            if await delete_whole(broker, job.id, job.tenant) is not None:
                await cancel_whole(broker, job)
                await delete_whole(broker, job.id, job.tenant)
        except BatchwayError as exc:
            log.warning("not forgotten yet (%s) job_id=%s", type(exc).__name__, job.id)


def _terms(gateway: Gateway, caller: Caller, body: ResponseBody, key: str, hashed: str) -> Terms:
    """The terms of a response. One in the background is a job like others; any other ends with its
    caller, unless the caller may come back with its Idempotency-Key."""
    settings = gateway.settings
    # A caller cannot return to a response that is not stored.
    ends_with_caller = not body.is_stored or (
        not key if body.on_disconnect is None else body.on_disconnect == "cancel"
    )
    return Terms(
        caller=caller,
        deadline_s=settings.job_deadline_s if body.background else settings.sync_deadline_s,
        retention_s=caller.job_retention_s(settings) if body.is_stored else MIN_RETENTION_S,
        attendance_s=settings.attendance_s if ends_with_caller and not body.background else 0.0,
        needs_worker=not body.background,
        idempotency_key=key if body.is_stored else "",
        body_hash=hashed if body.is_stored else "",
    )
