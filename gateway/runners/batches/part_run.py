"""Runs the lines of one part as jobs, and writes their results.

A line's job has the same id whoever submits it, so a later feeder finds the jobs of an earlier one.
Nothing of a part is recorded before all of its lines have ended and its objects are written.
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

import msgspec
from pydantic import ValidationError

from contract.batches import Part, line_job_id, part_key
from contract.errors import BatchwayError, BrokerUnavailable, ErrorCode, JobRefused
from contract.events import End
from contract.function_types import Submission
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus
from contract.payloads.store import PayloadUnavailable
from gateway.follow.members import delete_whole
from gateway.follow.streams import ended_answer
from gateway.http.errors import (
    ApiError,
    UnknownJob,
    failure_of,
    internal_error,
    to_api_error,
)
from gateway.http.handlers import translated
from gateway.http.sse import encode_json
from gateway.prepare.admission import Caller
from gateway.prepare.calls import prepare_call
from gateway.prepare.response_bodies import ResponseBody
from gateway.prepare.response_jobs import prepare_response
from gateway.redis.known_models import NotAnnounced
from gateway.runners.batches.lease import CANCELLED, EXPIRED, LeasedBatch
from gateway.runners.batches.lines import Line, call_body
from gateway.runners.submission import check_first_calls
from gateway.turns import Busy

log = logging.getLogger("batchway.gateway")

_LANE = "batch"
_RETENTION_S = 3_600.0  # of a line's job, beyond the window
_MAX_PAUSE_S = 5.0  # until a refused line is submitted again
_SPOOL_BYTES = 1024 * 1024  # of a part's results in memory; more is on disk
_NOT_RUN = {
    CANCELLED: "This request was not run: the batch was cancelled.",
    EXPIRED: "This request could not be executed before the completion window expired.",
}
_CUT_OFF = {
    CANCELLED: "This request was cut off: the batch was cancelled while it ran.",
    EXPIRED: "This request was cut off: the completion window expired while it ran.",
}
TEMPORARY = (BrokerUnavailable, PayloadUnavailable, Busy, NotAnnounced)


class PartRun:
    """One part. `number` counts from 0."""

    def __init__(self, leased: LeasedBatch, number: int, lines: Sequence[Line]) -> None:
        self._leased = leased
        self._broker = leased.gateway.broker
        self._poll_s = leased.gateway.settings.poll_s
        self._number = number
        self._jobs = {line_job_id(leased.batch.id, line.number): line for line in lines}
        self._refused: dict[str, ApiError] = {}  # of lines that cannot run
        self._run_again: set[str] = set()  # jobs whose objects were lost
        self._is_cut_short = False

    async def run(self) -> Part:
        """Runs the part. Raises LeaseLost; waits while Redis or the object store do not answer."""
        while True:
            try:
                await self._settle()
                return await self._written()
            except (*TEMPORARY, UnknownJob):
                await asyncio.sleep(self._poll_s)  # then settles those jobs

    async def forget_jobs(self) -> None:
        """Deletes the jobs, whose results are in the part, except responses that are stored."""
        for job_id in self._jobs.keys() - self._refused.keys():
            if self._jobs[job_id].is_kept:
                continue
            with contextlib.suppress(BatchwayError):
                await delete_whole(self._broker, job_id, self._leased.batch.tenant)

    async def _settle(self) -> None:
        """Returns once each line has been refused or its job has ended."""
        waiting = [job_id for job_id in self._jobs if job_id not in self._refused]
        while waiting:
            states = await self._states(waiting)
            left, postponed, pause_s = list[str](), list[str](), 0.0
            for job_id, state in zip(waiting, states, strict=True):
                stop_code = self._leased.stop_code  # preparing a line may take long
                if state in TERMINAL_STATUSES or (state is None and stop_code):
                    continue
                if state is None and not pause_s:
                    pause_s = await self._submit(job_id)
                    if pause_s:
                        postponed.append(job_id)  # the others come first: one may be smaller
                        continue
                elif stop_code:
                    with contextlib.suppress(UnknownJob):
                        await self._broker.cancel(job_id, self._leased.batch.tenant)
                left.append(job_id)
            waiting = [job_id for job_id in left if job_id not in self._refused] + postponed
            if waiting:
                await self._broker.sweep()
                await asyncio.sleep(pause_s or self._poll_s)

    async def _states(self, job_ids: Sequence[str]) -> list[str | None]:
        shard = self._leased.shard
        return await shard.ask("batch", shard.batches.job_states, job_ids)

    async def _submit(self, job_id: str) -> float:
        """Submits a line's job, or keeps the error of a line that cannot run. Returns the seconds
        until a new try if there is no room, otherwise 0."""
        try:
            caller = await self._entered()
        except JobRefused as exc:
            return min(exc.retry_after_s or self._poll_s, _MAX_PAUSE_S)
        except TEMPORARY:
            return self._poll_s
        try:
            gateway = self._leased.gateway
            job, submission = await self._prepared(job_id, caller)
            try:
                if job.flow is not None:
                    await check_first_calls(gateway, job, submission)
                await gateway.submit(job, submission)
            except JobRefused as exc:
                error = to_api_error(exc)
                if error.status in (429, 503) and await self._may_fit(job, submission, exc):
                    return min(exc.retry_after_s or self._poll_s, _MAX_PAUSE_S)
                self._refused[job_id] = error
        except ValidationError as exc:
            first: dict[str, Any] = dict(exc.errors()[0])
            first["loc"] = ("body", *first["loc"])
            self._refused[job_id] = translated(first, self._jobs[job_id].body)
        except TEMPORARY:
            return self._poll_s
        except BatchwayError as exc:
            self._refused[job_id] = to_api_error(exc)
        except Exception as exc:  # otherwise the batch would repeat it for ever
            self._refused[job_id] = self._unexpected(exc)
        return 0.0

    def _unexpected(self, exc: Exception) -> ApiError:
        batch_id = self._leased.batch.id
        log.error("batch_id=%s has a line that failed: %s", batch_id, type(exc).__name__)
        return internal_error()

    async def _may_fit(self, job: Job, submission: Submission, refused: JobRefused) -> bool:
        """Whether a refused job may be accepted once others have ended, because its tokens are
        within the limit. Limits that depend on a rate give no answer until it is measured."""
        if refused.retry_after_s is not None:
            return True
        limits, bound = submission.limits, submission.lane_bound_tokens
        most = {
            "tokens_per_min": 0,  # permanent, as there is no time to retry
            "concurrent_tokens": limits.concurrent_tokens,
            "lane_share": limits.lane_share * bound,
            "lane_tokens": bound,
            "lane_memory": 0,
            "tenant_memory": 0,
        }.get(refused.limit)
        return most is None or (await self._broker.quote(job, submission)).cost_tokens <= most

    async def _entered(self) -> Caller:
        """The batch's owner, after its limit of requests was charged. Raises JobRefused."""
        terms = self._leased.batch.asked.terms
        caller = Caller(terms, "")
        is_counted = await self._broker.enter(caller.tenant, caller.limits)
        return msgspec.structs.replace(caller, is_counted=is_counted)

    async def _prepared(self, job_id: str, caller: Caller) -> tuple[Job, Submission]:
        """A line's job and its submission. Raises BatchwayError, pydantic's ValidationError."""
        leased, gateway, line = self._leased, self._leased.gateway, self._jobs[job_id]
        endpoint = leased.batch.asked.endpoint
        body = call_body(line, endpoint)
        kept_s = caller.job_retention_s(gateway.settings) if line.is_kept else _RETENTION_S
        job = caller.job(endpoint, body, _LANE, job_id)
        submission = caller.submission(deadline_s=leased.left_s, retention_s=leased.left_s + kept_s)
        if isinstance(body, ResponseBody):
            return await prepare_response(gateway, body, job, submission)
        return await prepare_call(gateway, body, job, submission)

    async def _written(self) -> Part:
        """Writes the results, in the order of the lines."""
        num_completed = num_failed = 0
        num_tokens = [0, 0, 0, 0]
        self._is_cut_short = False
        with (
            tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as output,
            tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as errors,
        ):
            for job_id, line in self._jobs.items():
                result = await self._result(job_id)
                is_good = result["error"] is None and result["response"]["status_code"] == 200
                num_completed += is_good
                num_failed += not is_good
                if is_good:
                    used = _tokens(result["response"]["body"]["usage"])
                    num_tokens = [sum(pair) for pair in zip(num_tokens, used, strict=True)]
                head = {"id": f"batch_req_{job_id.rpartition('-')[2]}", "custom_id": line.custom_id}
                file = cast(BinaryIO, output if is_good else errors)
                file.write(encode_json(head | result) + b"\n")
            return Part(
                self._leased.token,
                num_completed,
                num_failed,
                await self._put("output", cast(BinaryIO, output)),
                await self._put("error", cast(BinaryIO, errors)),
                self._is_cut_short,
                *num_tokens,
            )

    async def _put(self, kind: str, file: BinaryIO) -> int:
        """Stores a file. Returns the number of bytes."""
        num_bytes = file.tell()
        if num_bytes:
            file.seek(0)
            leased = self._leased
            key = part_key(leased.batch.id, kind, self._number, leased.token)
            await asyncio.to_thread(leased.store.write, key, file)
        return num_bytes

    async def _result(self, job_id: str) -> dict[str, Any]:
        """The `response` and `error` of a line. Raises UnknownJob if its job has not ended."""
        if job_id in self._refused:
            return _response(job_id, self._refused[job_id])
        stop_code = self._leased.stop_code
        try:
            view, _ = await self._broker.read(job_id, self._leased.batch.tenant)
        except UnknownJob:
            if stop_code is None:
                raise
            return self._cut_short(stop_code, _NOT_RUN)
        if not view.is_terminal:  # submitted just now by a feeder that has lost its lease
            raise UnknownJob
        messages = _NOT_RUN if view.claimed_ms is None else _CUT_OFF
        if view.status is JobStatus.EXPIRED:
            return self._cut_short(EXPIRED, messages)
        if view.status is JobStatus.CANCELLED and stop_code is not None:
            return self._cut_short(stop_code, messages)
        failure = failure_of(End(view.status, view.code, view.message, 0, 0))
        if failure is None:
            try:
                body = await ended_answer(self._leased.gateway, view)
            except (*TEMPORARY, UnknownJob):
                raise
            except BatchwayError as exc:
                failure = to_api_error(exc)
            except Exception as exc:
                failure = self._unexpected(exc)
        if failure is None:
            response = {"status_code": 200, "request_id": job_id, "body": body}
            return {"response": response, "error": None}
        if failure.code == ErrorCode.PAYLOAD_LOST and job_id not in self._run_again:
            # Redis may have lost the part's record, and that the job was deleted with its object.
            self._run_again.add(job_id)
            await delete_whole(self._broker, job_id, self._leased.batch.tenant)
            raise UnknownJob
        return _response(job_id, failure)

    def _cut_short(self, code: str, messages: Mapping[str, str]) -> dict[str, Any]:
        self._is_cut_short = self._is_cut_short or code == EXPIRED
        return {"response": None, "error": {"code": code, "message": messages[code]}}


def _tokens(usage: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Returns an answer's input and output tokens, those of reasoning in the output, and those of
    the input that were cached. A response has other names for them, and vectors have no output."""
    num_input: int = usage["input_tokens"] if "input_tokens" in usage else usage["prompt_tokens"]
    num_output = usage.get("output_tokens") or usage.get("completion_tokens", 0)
    outputs = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    inputs = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    details = outputs.get("reasoning_tokens", 0), inputs.get("cached_tokens", 0)
    return num_input, num_output, *details


def _response(job_id: str, error: ApiError) -> dict[str, Any]:
    return {
        "response": {"status_code": error.status, "request_id": job_id, "body": error.body()},
        "error": None,
    }
