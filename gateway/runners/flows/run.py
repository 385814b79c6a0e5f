"""Runs one claimed job of a flow: appends the events of its execution to the job's log."""

import asyncio
import logging
from contextlib import aclosing

from contract.errors import BatchwayError, BrokerUnavailable, ErrorCode
from contract.events import LogEvent, MemberRun, Members, Tokens
from contract.function_types import Append, Claimed, Verdict
from contract.functions import Functions
from contract.jobs import JobStatus
from gateway.follow.members import cancel_whole
from gateway.http.errors import UnknownJob
from gateway.runners.flows.calls import Execution, MemberFailed, ModelCalls
from gateway.runners.flows.kinds import events_of
from gateway.runners.flows.stage_queues import StageQueues
from gateway.state import Gateway
from gateway.turns import Owner, work_for

_Waiting = tuple[Append, "asyncio.Future[Verdict | JobStatus]"]

log = logging.getLogger("batchway.flows")

_RETRY_S = 0.2  # between attempts while Redis is unreachable
_PAGE_EVENTS = 500


class FlowPublisher:
    """Appends for one incarnation until `run` is cancelled. Each call takes all that waits."""

    def __init__(self, functions: Functions, incarnation: str, lease_s: float) -> None:
        self._functions = functions
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()

    async def append(self, item: Append) -> Verdict | JobStatus:
        """Appends to a job's log. Returns once Redis has decided. Raises BatchwayError."""
        future: asyncio.Future[Verdict | JobStatus] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            items = [item for item, _ in waiting]
            try:
                verdicts = await self._functions.append(
                    self._incarnation, items, lease_s=self._lease_s
                )
            except BatchwayError as exc:
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(exc)
            else:
                for (_, future), (verdict, _) in zip(waiting, verdicts, strict=True):
                    if not future.done():
                        future.set_result(verdict)


class NotHeld(Exception):
    """The job is no longer this run's. `status`: how it has ended; None if another has it."""

    def __init__(self, status: JobStatus | None) -> None:
        super().__init__(status)
        self.status = status


class Run:
    """One claim of a flow's job."""

    def __init__(
        self,
        gateway: Gateway,
        publisher: FlowPublisher,
        claimed: Claimed,
        stages: StageQueues | None,
    ) -> None:
        self._stages = stages
        self.claimed = claimed
        self.job = claimed.job
        self._broker = gateway.broker
        self._publisher = publisher
        self._calls = ModelCalls(
            gateway,
            claimed.job,
            lane=claimed.job.lane,
            deadline_s=gateway.broker.clock() + claimed.deadline_s,
        )
        self._execution: Execution | None = None
        self._deadline_ms: int | None = None  # as last read, by Redis's clock
        self._number = 0  # of the last event in the log
        self._shown: dict[int, int] = {}  # output tokens in the log, by choice

    async def run(self) -> None:
        """Runs until the job has ended, or is no longer held. Begins again if Redis did not answer;
        nothing is written to the log twice."""
        work_for(Owner(self.job.tenant, self.job.weight, is_attended=False))
        while True:
            try:
                await self._attempt()
                return
            except NotHeld as lost:
                if lost.status is not None:
                    await self.cancel_calls()
                return
            except BatchwayError as exc:
                log.info("flow waits error=%s job_id=%s", type(exc).__name__, self.job.id)
                await asyncio.sleep(_RETRY_S)

    async def move(self, lane: str, left_s: float) -> None:
        """Gives the calls that run the job's new lane and deadline."""
        self._calls.lane, self._calls.deadline_s = lane, self._broker.clock() + left_s
        self._deadline_ms = None
        for run in self._execution.unfinished() if self._execution else ():
            try:
                await self._broker.reprioritise(
                    run.job_id, self.job.tenant, lane=lane, deadline_s=left_s
                )
            except BatchwayError as exc:
                log.info("call not moved error=%s job_id=%s", type(exc).__name__, run.job_id)

    async def is_over(self) -> bool:
        """Whether the job has ended, or is gone."""
        try:
            view, _ = await self._broker.read(self.job.id, self.job.tenant)
        except UnknownJob:
            return True
        except BatchwayError:
            return False
        return view.is_terminal

    async def cancel_calls(self) -> None:
        """Cancels the calls that run, if Redis answers; otherwise they end by their deadline."""
        for run in self._execution.unfinished() if self._execution else ():
            try:
                called, _ = await self._broker.read(run.job_id, self.job.tenant)
                await cancel_whole(self._broker, called.job)
            except UnknownJob:
                continue
            except BatchwayError as exc:
                log.info("call not cancelled error=%s job_id=%s", type(exc).__name__, run.job_id)

    async def _attempt(self) -> None:
        known = await self._read_log()
        execution = self._execution = Execution(self._calls, known, self._stages)
        code = message = ""
        number, logged = 0, self._number
        try:
            async with aclosing(events_of(execution)) as events:
                async for event in events:
                    number += 1
                    if number > logged:
                        await self._append(event)
        except MemberFailed as exc:
            code, message = exc.code, exc.message
            await self.cancel_calls()
        num_prompt, num_output, num_cached = execution.num_tokens()
        await self._send(
            Append(
                self.job.id,
                self.claimed.epoch,
                self._number + 1,
                execution.take_unlogged() if execution.has_unlogged else None,
                # of the calls that are not in the flow's own output
                max(0, num_output - sum(self._shown.values())),
                fin=JobStatus.FAILED if code else JobStatus.SUCCEEDED,
                code=code,
                message=message,
                prompt_tokens=num_prompt,
                cached_tokens=num_cached,
            )
        )

    async def _read_log(self) -> dict[str, MemberRun]:
        """Returns the calls in the log. Sets the log's end."""
        known: dict[str, MemberRun] = {}
        self._number, self._shown = 0, {}
        while True:
            view, entries = await self._broker.read(
                self.job.id, self.job.tenant, after=self._number, max_events=_PAGE_EVENTS
            )
            if view.is_terminal:
                raise NotHeld(view.status)
            for entry in entries:
                if isinstance(entry.event, Members):
                    known.update({run.job_id: run for run in entry.event.runs})
                elif isinstance(entry.event, Tokens):
                    self._note_shown(entry.event)
                self._number = entry.number
            if view.ends_with(entries):
                self._calls.lane = view.lane
                if self._deadline_ms is not None:  # a message that it has moved may be lost
                    self._calls.deadline_s += (view.deadline_ms - self._deadline_ms) / 1000
                self._deadline_ms = view.deadline_ms
                return known

    def _note_shown(self, event: Tokens) -> None:
        for delta in event.deltas:
            self._shown[delta.choice] = delta.start + len(delta.token_ids)

    async def _append(self, event: LogEvent) -> None:
        if isinstance(event, Tokens):
            self._check_follows(event)
        number, num_tokens = self._number + 1, _num_tokens(event)
        await self._send(Append(self.job.id, self.claimed.epoch, number, event, num_tokens))
        self._number = number
        if isinstance(event, Tokens):
            self._note_shown(event)

    def _check_follows(self, event: Tokens) -> None:
        """Raises MemberFailed if the event does not continue this log: Redis has lost output of a
        call, which on its repetition comes in other portions."""
        for delta in event.deltas:
            if delta.start != self._shown.get(delta.choice, 0):
                message = f"{self.job.model}: Redis lost a part of a call's output"
                raise MemberFailed(ErrorCode.ENGINE_ERROR, message)

    async def _send(self, item: Append) -> None:
        """Appends to the log. Raises NotHeld, BatchwayError."""
        verdict = await self._publisher.append(item)
        if isinstance(verdict, JobStatus):
            raise NotHeld(verdict)
        if verdict is Verdict.GAP:
            raise BrokerUnavailable("Redis lost a part of the log")
        if verdict is not Verdict.OK:
            raise NotHeld(None)


def _num_tokens(event: LogEvent) -> int:
    deltas = event.deltas if isinstance(event, Tokens) else ()
    return sum(len(delta.token_ids) for delta in deltas)
