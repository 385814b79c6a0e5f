"""Takes a flow's jobs, like a worker of a model: with leases, epochs and control messages."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

import redis.asyncio

from contract.connection import end_tasks
from contract.consumer import MAX_CONTROL, keep_leases, listen
from contract.errors import BatchwayError, BrokerUnavailable
from contract.function_types import MAX_CLAIM, Claimed, Release, WorkerCapacity
from contract.functions import Functions
from contract.keys import Keys
from gateway.runners.flows.run import FlowPublisher, Run

log = logging.getLogger("batchway.flows")

LEASE_S = 10.0
_POLL_S = 1.0  # between claims without a wake-up message, as messages may be lost
_RETRY_S = 0.2  # between attempts while Redis is unreachable
_MAX_JOBS = 4096  # at once. Flows may wait for flows: few places could all wait for others
_MAX_TOKENS = 2**40


class FlowWorker:
    """The worker of one flow. `client` is shared; `runs` makes the run of a claimed job."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        model: str,
        lanes: tuple[str, ...],
        runs: Callable[[FlowPublisher, Claimed], Run],
    ) -> None:
        self.model = model
        self.lanes = lanes
        self.incarnation = f"flow-{secrets.token_hex(8)}"
        self._client = client
        self._keys = keys
        self._functions = Functions(client, keys)
        self._lease_s = LEASE_S
        self._control: asyncio.Queue[str] = asyncio.Queue(MAX_CONTROL)
        self._publisher = FlowPublisher(self._functions, self.incarnation, LEASE_S)
        self._make_run = runs
        self._held: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._duties: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self.is_draining = False
        self.is_idle = False  # it holds no job, and none waits

    def start(self) -> None:
        who = self._client, self._keys, self.model, self.incarnation
        duties = [
            self._publisher.run(),
            self._beat(),
            self._claim_jobs(),
            listen(*who, self._wake, self._control),
            self._handle_messages(),
        ]
        self._duties = [asyncio.create_task(duty) for duty in duties]

    @property
    def failure(self) -> BaseException | None:
        """The error that ended one of its tasks, which never end by themselves."""
        return next((task.exception() for task in self._duties if task.done()), None)

    async def aclose(self) -> None:
        """Gives back the jobs that it holds."""
        held = {job_id: run.claimed.epoch for job_id, (run, _) in self._held.items()}
        runs = [task for _, task in self._held.values()]
        await end_tasks(*self._duties, *runs, *self._ending)
        await self._leave(held)

    def drain(self) -> None:
        """Takes no more jobs."""
        self.is_draining = True

    # --- claims -------------------------------------------------------------------------------

    async def _claim_jobs(self) -> None:
        has_lost_reply = False
        while True:
            poll = asyncio.get_running_loop().call_later(_POLL_S, self._wake.set)
            await self._wake.wait()
            poll.cancel()
            self._wake.clear()
            self.is_idle = False
            try:
                if has_lost_reply:
                    known = list(self._held)
                    await self._start(
                        await self._functions.mine(self.incarnation, known, lease_s=self._lease_s)
                    )
                    has_lost_reply = False
                while not self.is_draining and await self._start(await self._claim()):
                    pass
                self.is_idle = not self._held
            except BrokerUnavailable:
                has_lost_reply = True  # the call may have claimed jobs
                await asyncio.sleep(_RETRY_S)
                self._wake.set()
            except BatchwayError as exc:
                log.error("claim failed: %s model=%s", exc, self.model)
                await asyncio.sleep(_POLL_S)

    async def _claim(self) -> list[Claimed]:
        return await self._functions.claim(
            self.incarnation,
            self.model,
            self.lanes,
            lease_s=self._lease_s,
            max_jobs=min(MAX_CLAIM, _MAX_JOBS - len(self._held)),
            max_tokens=_MAX_TOKENS,
            is_idle=True,
        )

    async def _start(self, claimed: list[Claimed]) -> int:
        """Begins the runs of claimed jobs, and returns the number claimed. If the name has become a
        model's, gives these jobs back and takes no more."""
        foreign = [job for job in claimed if job.job.flow is None]
        if foreign:
            self.drain()
            items = [Release(job.job.id, job.epoch, "drain") for job in foreign]
            await self._functions.release(self.incarnation, items)
        for job in claimed:
            if job.job.flow is None:
                continue
            run = self._make_run(self._publisher, job)
            task = asyncio.create_task(run.run())
            self._held[job.job.id] = run, task
            task.add_done_callback(lambda done, run=run: self._ended(run, done))  # type: ignore[misc]
        return len(claimed)

    def _ended(self, run: Run, task: "asyncio.Task[None]") -> None:
        held = self._held.get(run.job.id)
        if held is not None and held[0] is run:
            del self._held[run.job.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("flow failed error=%s job_id=%s", type(error).__name__, run.job.id)
            self._start_task(self._give_back(run, error))

    async def _give_back(self, run: Run, error: BaseException) -> None:
        message = f"the flow could not be run: {type(error).__name__}"
        item = Release(run.job.id, run.claimed.epoch, "error", "engine_error", message)
        try:
            await self._functions.release(self.incarnation, [item])
        except BatchwayError as exc:
            log.info("not released, its lease will lapse: %s", type(exc).__name__)
        if await run.is_over():  # that was the last attempt
            await run.cancel_calls()

    # --- leases and messages ------------------------------------------------------------------

    async def _beat(self) -> None:
        await self._try_report()
        await keep_leases(self._try_report, every_s=self._lease_s / 4)

    async def _try_report(self) -> None:
        try:
            await self._report()
        except BatchwayError as exc:
            log.info("no heartbeat error=%s model=%s", type(exc).__name__, self.model)

    async def _report(self) -> None:
        held = [(job_id, run.claimed.epoch) for job_id, (run, _) in self._held.items()]
        capacity = WorkerCapacity(max_tokens=_MAX_TOKENS, max_jobs=_MAX_JOBS, lanes=self.lanes)
        lost = await self._functions.heartbeat(
            self.incarnation,
            self.model,
            held,
            lease_s=self._lease_s,
            info=json.dumps({"jobs_held": len(held)}),
            capacity=capacity,
            state="draining" if self.is_draining else "up",
        )
        reported = dict(held)
        for job_id in lost:
            if job_id in self._held and self._held[job_id][0].claimed.epoch == reported[job_id]:
                self._drop(job_id)

    def _drop(self, job_id: str) -> None:
        """Stops a run whose job has ended, or belongs to another process."""
        held = self._held.pop(job_id, None)
        if held is not None:
            self._start_task(_stopped(*held))

    def _start_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _handle_messages(self) -> None:
        while True:
            match (await self._control.get()).split():
                case ["ended", job_id, _]:
                    self._drop(job_id)
                case ["moved", job_id, lane, left_ms] if job_id in self._held:
                    run, _ = self._held[job_id]
                    self._start_task(run.move(lane, int(left_ms) / 1000))

    async def _leave(self, held: dict[str, int]) -> None:
        """Gives its jobs (id to epoch) back, including those of a claim whose reply was lost. If
        Redis does not answer, their leases lapse."""
        try:
            found = await self._functions.mine(self.incarnation, [*held], lease_s=self._lease_s)
            held |= {each.job.id: each.epoch for each in found}
            items = [Release(job_id, epoch, "drain") for job_id, epoch in held.items()]
            if items:
                await self._functions.release(self.incarnation, items)
            await self._functions.leave(self.incarnation, self.model)
        except BatchwayError as exc:
            log.info("jobs not released error=%s model=%s", type(exc).__name__, self.model)


async def _stopped(run: Run, task: "asyncio.Task[None]") -> None:
    await end_tasks(task)
    if await run.is_over():
        await run.cancel_calls()
