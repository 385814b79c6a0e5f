"""Works through operations on many jobs: cancels, replays of jobs and of callbacks.

Any number of gateways do. An operation whose gateway died is leased by another once its lease has
lapsed, and goes on after the last step.
"""

import asyncio
import contextlib
import logging
import secrets
import time

from msgspec.structs import replace

from contract.batches import LeaseLost
from contract.errors import BatchwayError, BrokerUnavailable, JobRefused
from contract.function_types import Submission
from contract.jobs import Job
from contract.operations import MAX_STEP_JOBS, Operation, OperationProgress, OperationState
from contract.payloads.store import PayloadUnavailable
from gateway.follow.members import cancel_whole
from gateway.http.errors import ApiError, RecordUnreadable, UnknownJob
from gateway.prepare.calls import bound_of, stored_bounds
from gateway.prepare.job_bodies import check_secret
from gateway.prepare.vectors import vector_bytes
from gateway.redis.shards import GatewayShard
from gateway.runners.submission import check_first_calls
from gateway.state import Gateway

log = logging.getLogger("batchway.gateway")

LEASE_S = 10.0
_TURN_S = 1.0  # then it is another operation's turn
_REPLAYS = 10  # jobs of one step; their prompts may be in an object store


class _NoRoom(Exception):
    """A job is refused for now."""


async def run_operations(gateway: Gateway, shard: GatewayShard) -> None:
    """Works on the operations of a partition until cancelled."""
    while True:
        has_worked = False
        if not gateway.drain.has_begun:
            with contextlib.suppress(BatchwayError):  # the breaker logs that Redis is down
                has_worked = await work(gateway, shard)
        await asyncio.sleep(0 if has_worked else gateway.settings.poll_s)


async def work(gateway: Gateway, shard: GatewayShard, only: str = "") -> bool:
    """Works for about a second on one operation of a partition that no other gateway holds; `only`:
    on this. Returns whether there is more to do at once. Raises BatchwayError."""
    operations, token = shard.operations, secrets.token_hex(8)
    operation_id = await shard.ask("operation", operations.take, token, lease_s=LEASE_S, only=only)
    if operation_id is None:
        return False
    operation = await shard.ask("operation", operations.find, operation_id)
    if operation is None:
        return False
    run = _Run(gateway, shard, operation, token)
    try:
        return await run.advance()
    finally:
        with contextlib.suppress(BatchwayError):  # then the lease lapses
            await shard.ask("operation", operations.give_back, operation_id, token)


class _Run:
    """An operation that this gateway holds."""

    def __init__(
        self, gateway: Gateway, shard: GatewayShard, operation: Operation, token: str
    ) -> None:
        self._gateway = gateway
        self._shard = shard
        self._operation = operation
        self._token = token

    async def advance(self) -> bool:
        """Returns whether it can go on at once."""
        until_s = self._gateway.broker.clock() + _TURN_S
        is_replay = self._operation.kind == "replay"
        reported: OperationProgress | None = None
        while True:
            try:
                step = await self._step(reported)
            except LeaseLost:
                return True
            if not is_replay:
                await self._end_calls(step)
            if step.state is not OperationState.RUNNING:
                words = step.matched, step.done, step.failed
                log.info("operation %s %s: %d, %d, %d", self._operation.id, step.state, *words)
                return True
            reported = None
            if is_replay and step.job_ids:
                reported, is_whole = await self._replay(step)
                if not is_whole:
                    return False
            if self._gateway.broker.clock() > until_s:
                if reported is not None:
                    await self._step(reported, max_jobs=0)
                return True

    async def _step(
        self, reported: OperationProgress | None, *, max_jobs: int | None = None
    ) -> OperationProgress:
        """Raises LeaseLost."""
        most = _REPLAYS if self._operation.kind == "replay" else MAX_STEP_JOBS
        return await self._shard.ask(
            "operation",
            self._shard.operations.step,
            self._operation.id,
            self._token,
            lease_s=LEASE_S,
            reported=reported,
            max_jobs=most if max_jobs is None else max_jobs,
        )

    async def _end_calls(self, step: OperationProgress) -> None:
        """Cancels the calls of ended flows, whose own gateway may have died."""
        for job_id, tenant in map(str.split, step.job_ids):
            with contextlib.suppress(UnknownJob, RecordUnreadable):
                view, _ = await self._gateway.broker.read(job_id, tenant)
                await cancel_whole(self._gateway.broker, view.job)

    # --- replays ------------------------------------------------------------------------------

    async def _replay(self, step: OperationProgress) -> tuple[OperationProgress, bool]:
        """Submits the jobs of a step. Returns the step with new counts; and False where a job finds
        no room: then all of them are submitted again later, which changes nothing for the others.
        """
        num_done = num_failed = 0
        for job_id in step.job_ids:
            try:
                is_done = await self._submit_again(job_id)
            except (_NoRoom, BrokerUnavailable, PayloadUnavailable):
                return step, False
            num_done += is_done
            num_failed += not is_done
        matched = step.matched + len(step.job_ids)
        done, failed = step.done + num_done, step.failed + num_failed
        return replace(step, matched=matched, done=done, failed=failed), True

    async def _submit_again(self, job_id: str) -> bool:
        """Whether the job is there again. Raises _NoRoom, BrokerUnavailable, PayloadUnavailable."""
        try:
            found = await self._gateway.broker.replay_of(job_id)
            if found is None:
                return False
            job, submission = await self._prepared(*found)
            if job.flow is not None:
                await check_first_calls(self._gateway, job, submission)
            await self._gateway.submit(job, submission)
        except (BrokerUnavailable, PayloadUnavailable):
            raise
        except JobRefused as exc:
            if exc.retry_after_s is not None:
                raise _NoRoom from exc
            log.info("not replayed job_id=%s: %s", job_id, exc.code)
            return False
        except (BatchwayError, ApiError) as exc:
            log.info("not replayed job_id=%s: %s", job_id, type(exc).__name__)
            return False
        return True

    async def _prepared(self, job: Job, submission: Submission) -> tuple[Job, Submission]:
        """The job with its prompt, and the bounds of this installation. Raises PayloadError, and
        ApiError if its callback can no longer be signed."""
        broker, settings = self._gateway.broker, self._gateway.settings
        if submission.callback is not None:
            check_secret(submission.callback, job.tenant, settings)
        response = await broker.payloads.response(job)
        whole = await broker.payloads.with_images(await broker.payloads.whole(job))
        created_s = int(time.time())
        job = replace(whole, stored_prompt=None, response=response, created_s=created_s)
        job = replace(job, stored_response=None)
        memory_bytes = await broker.known.max_memory_bytes()
        bound_tokens, bound_s = bound_of(settings, job.lane, memory_bytes)
        max_stored_bytes, max_tenant_stored_bytes = stored_bounds(settings, memory_bytes)
        return job, replace(
            submission,
            limits=self._operation.limits,
            lane_bound_tokens=bound_tokens,
            lane_bound_s=bound_s,
            max_stored_bytes=max_stored_bytes,
            max_tenant_stored_bytes=max_tenant_stored_bytes,
            cold_start_s=settings.cold_start_s,
            vector_bytes=await self._vector_bytes(job),
        )

    async def _vector_bytes(self, job: Job) -> int:
        card = (await self._gateway.broker.known.models()).get(job.model)
        if job.pooling is None or card is None or card.pooling is None:
            return 0
        return vector_bytes(job.num_prompts, job.pooling.dimensions or card.pooling.num_outputs)
