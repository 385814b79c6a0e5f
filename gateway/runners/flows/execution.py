"""One run of a flow's job: its calls, and what is logged of them.

The log of a flow depends only on its own job and the logs of its calls. A run that begins again
gives the same events in the same order.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec.structs import replace

from contract.connection import end_tasks
from contract.errors import BatchwayError, ErrorCode
from contract.events import MemberRun, Members, Prompt, Tokens
from contract.jobs import JobStatus
from gateway.runners.flows.calls import Call, Calls, MemberFailed, Outcome, failed
from gateway.runners.flows.stage_queues import StageQueues

Output = Prompt | Tokens
_OTHER_SHAPE = "its answer has another number of choices or inputs than the call"
_FORGOTTEN = "its output is no longer kept, and the flow could not go on without it"


class Execution:
    """One run. `known`: calls that are already in the log, by job id. `stages`: those of a staged
    pipeline."""

    def __init__(
        self, calls: Calls, known: Mapping[str, MemberRun], stages: StageQueues | None
    ) -> None:
        self.stages = stages
        self.calls = calls
        self.parent = calls.parent
        self.begun: dict[str, MemberRun] = {}  # by job id, as they are now
        self._known = known
        self._unlogged: list[MemberRun] = []

    def log_begun(self, *calls: Call) -> Members:
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

    def num_tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all calls that have ended."""
        runs = self.begun.values()
        return sum(run.prompt_tokens for run in runs), sum(run.output_tokens for run in runs)

    def _note(self, run: MemberRun) -> None:
        self.begun[run.job_id] = run
        self._unlogged.append(run)

    async def run_call(self, call: Call) -> Outcome:
        """Makes a call, and returns it with all its output."""
        outcome = await self._collected(call)
        self._note(outcome.run)
        return outcome

    async def run_calls(self, calls: Sequence[Call]) -> list[Outcome]:
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

    async def _collected(self, call: Call) -> Outcome:
        events: list[Output] = []
        outcome: Outcome | None = None
        async for item in self._follow(call):
            if isinstance(item, Outcome):
                outcome = item
            else:
                events.append(item)
        assert outcome is not None
        return replace(outcome, events=tuple(events))

    async def stream_call(self, call: Call) -> AsyncIterator[Output]:
        """Makes the call that decides, and yields its output as it comes. Raises MemberFailed."""
        outcome: Outcome | None = None
        async for item in self._follow(call):
            if isinstance(item, Outcome):
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
            if params.logprobs is None:
                event = Tokens(tuple(replace(delta, logprobs=None) for delta in event.deltas))
            found.append(event)
        return found

    async def _follow(self, call: Call) -> AsyncIterator[Output | Outcome]:
        run = self._known.get(call.job_id(self.parent.id))
        if run is not None and run.status not in (None, JobStatus.SUCCEEDED):
            yield Outcome(run, message="it has failed before")
            return
        try:
            job = await self.calls.known(call) if run is not None else None
            if job is None and run is not None and run.status is not None:
                lost = replace(run, status=JobStatus.FAILED, code=ErrorCode.RETRIES)
                yield Outcome(lost, message=_FORGOTTEN)
                return
            submitted_s = None
            if job is None:
                job, submitted_s = await self.calls.begin(call)
        except BatchwayError as exc:
            yield failed(call, self.parent.id, exc)
            return
        async for item in self.calls.follow(call, job, submitted_s):
            yield item
