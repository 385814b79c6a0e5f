"""Simulates a fleet: discrete events on a virtual clock over the code of production.

The queue is that of production (infra/planning/queue.py). Each worker (infra/planning/worker.py)
claims as in production and runs a real engine, on a model that takes the time of its cost model. A
pool of workers is sized by infra.aws.pool_service.

Two things are simplified. A worker reports a job's tokens at its first one, at each heartbeat,
before a death and at its end, not at each step. A job that is submitted wakes one worker after
another, at random, until the job is taken; in production all try at once, and the others find
nothing. A session ends with a turn that is not answered.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from msgspec.structs import replace

from contract.errors import JobRefused
from contract.function_types import Append, Blame, Claimed, Release, Submission, Verdict
from contract.jobs import TERMINAL_STATUSES, Endpoint, Job, JobStatus, SamplingParams
from contract.residence import marks_of
from gateway.prepare.calls import bound_of
from gateway.settings import GatewaySettings
from infra.aws.pool_service import EVERY_S, PoolService, PoolWatch
from infra.aws.workforce import OtherScaler
from infra.planning.engine import OUTPUT_ID
from infra.planning.outcome import SimulationOutcome
from infra.planning.queue import VirtualQueue, done
from infra.planning.traces import Arrival, next_turn, prompt_of
from infra.planning.worker import MODEL, Fleet, SimulatedJob, Worker
from infra.pool import PoolPolicy
from workers.engine.sequence import RequestRefused
from workers.engine.step_plan import StepReport

_EPOCH_S = 1_700_000_000
_MAX_SWEEPS_PER_S = 10  # more find nothing
_MOST_ENDED = 64  # jobs that are deleted at a time
_IDLE_S = 1e-3  # until a step without work is tried again
_GIVE_UP_S = 3.0  # of a gateway, while Redis does not answer
_MAX_RETRY_AFTER_S = 60.0  # openai's client then waits by itself
_BACKOFF_S = 0.5, 8.0  # its first and its longest wait
_WANTED_S = 600.0  # a refused caller may come again in so long

# Claims that look where content lies; the names of sessions in calls; blocks that stay over a
# pause, as every turn but a session's last one calls a tool.
Part = Literal["residence", "sessions", "retention"]
FaultKind = Literal["kill", "engine", "spot", "pause", "roll"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the fleet: a worker or its engine dies; a worker is to be reclaimed; Redis
    does not answer for `seconds`; all workers are replaced, one after another. `worker`: which, in
    the order of their starts; None: any."""

    at_s: float
    kind: FaultKind
    seconds: float = 0.0
    worker: int | None = None


@dataclass(slots=True)
class _Call:
    """An accepted call that has not ended."""

    arrival: Arrival
    arrival_s: float
    prompt_ids: tuple[int, ...]
    first_s: float | None = None


class _Workforce(OtherScaler):
    """The workers, as the pool's service sees them. It keeps all that have work."""

    drains: ClassVar[bool] = True

    def __init__(self, simulation: "Simulation", num: int) -> None:
        super().__init__(num)
        self._simulation = simulation

    def resize(self, num: int) -> None:
        for _ in range(num - self.num_desired()):
            self._simulation.start_worker()
        super().resize(num)


class Simulation:
    """One run. `retries`: how often callers come back after a refusal, as openai's client does;
    `without`: parts that are left out, for a comparison."""

    def __init__(
        self,
        fleet: Fleet,
        url: str,
        outcome: SimulationOutcome,
        *,
        seed: int = 1,
        retries: int = 0,
        without: Collection[Part] = (),
    ) -> None:
        self.fleet = fleet
        self.now_s = 0.0
        self.outcome = outcome
        self.workers: dict[str, Worker] = {}
        self.queue = VirtualQueue(url, lambda: int(1000 * (_EPOCH_S + self.now_s)))
        self._rng = random.Random(seed)
        self._retries = retries
        self._without = without
        self._settings = GatewaySettings.from_env(redis_url=url)
        self._memory_bytes = self.queue.memory_bytes()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = itertools.count()
        self._calls: dict[str, _Call] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._ended: list[tuple[str, str]] = []  # jobs to delete
        self._num_jobs = 0
        self._num_workers = 0
        self._num_waiting = 0  # in the queue
        self._hungry: dict[str, Worker] = {}  # with room left to fill
        self._paused_until_s = 0.0
        self._is_over = False
        self._arrivals: Iterator[Arrival] = iter(())
        self._num_coming = 0  # retries

    # --- the loop -----------------------------------------------------------------------------

    def run(
        self,
        arrivals: Iterable[Arrival],
        faults: Iterable[Fault] = (),
        progress: Callable[[float, int], None] = lambda now_s, num: None,
    ) -> SimulationOutcome:
        """Runs until all calls have ended. `progress`: called now and then with the virtual time
        and the number of arrivals."""
        coming = iter(arrivals)
        first = list(itertools.islice(coming, 1))
        if first and not (first[0].blocks or first[0].session):  # a cache would fill in vain
            options = replace(self.fleet.options, prefix_caching=False)
            self.fleet = dataclasses.replace(self.fleet, options=options)
        fleet = self.fleet
        for _ in range(fleet.num_workers):
            self._worker_ready()
        if fleet.policy is not None:
            self._start_pool(fleet.policy)
        for fault in faults:
            self._at(fault.at_s, self._break, fault)
        self._arrivals = itertools.chain(first, coming)
        self._next_arrival()
        self._at(1.0, self._sweep)
        self._at(1.0, self._watch, progress)
        while self._events and not self._is_over:
            self.now_s, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        self.outcome.ended_s = self.now_s
        for worker in self.workers.values():
            self.outcome.gpu_s += self.now_s - worker.begun_s
        self.queue.close()
        return self.outcome

    def _at(self, at_s: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._counter), act, arguments))

    def _delayed(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Whether Redis does not answer now: then this is done when it does."""
        if self.now_s < self._paused_until_s:
            self._at(self._paused_until_s, act, *arguments)
            return True
        return False

    def _watch(self, progress: Callable[[float, int], None]) -> None:
        second = self.outcome.second(self.now_s)
        second.num_waiting, second.num_workers = self._num_waiting, len(self.workers)
        progress(self.now_s, self.outcome.num_arrivals)
        while self._deadlines and self._deadlines[0][1] not in self._calls:
            heapq.heappop(self._deadlines)
        if self._num_waiting:  # as workers do that have heard nothing for a second
            for worker in list(self.workers.values()):
                if worker.stepping is None:
                    self._claim(worker)
        self._at(self.now_s + 1.0, self._watch, progress)

    # --- callers ------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._is_last()
        else:
            self._num_coming += 1
            self._at(arrival.arrival_s, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._next_arrival()
        self._begin_turn(arrival)

    def _begin_turn(self, arrival: Arrival) -> None:
        self.outcome.num_arrivals += 1
        self._submit(arrival, self.now_s, 0)

    def _submit(self, arrival: Arrival, arrival_s: float, num_tried: int) -> None:
        if self._paused_until_s - self.now_s > _GIVE_UP_S:
            self._num_coming -= 1
            self._refuse(arrival, arrival_s, num_tried, "broker_unavailable", None)
            return
        if self._delayed(self._submit, arrival, arrival_s, num_tried):
            return
        self._num_coming -= 1
        job, submission = self._job(arrival)
        try:
            done(self.queue.functions.submit(job, submission))
        except JobRefused as refusal:
            if refusal.code == "no_workers":
                done(self.queue.starts.want(MODEL, arrival.lane, _WANTED_S))
            reason = refusal.limit or str(refusal.code)
            self._refuse(arrival, arrival_s, num_tried, reason, refusal.retry_after_s)
            return
        self._calls[job.id] = _Call(arrival, arrival_s, job.prompt_ids)
        heapq.heappush(self._deadlines, (self.now_s + submission.deadline_s, job.id))
        self._num_waiting += 1
        wake_s = self._rng.choice(self.fleet.wakes_s)
        self._at(self.now_s + wake_s, self._offer, arrival.lane, arrival.tenant)

    def _job(self, arrival: Arrival) -> tuple[Job, Submission]:
        self._num_jobs += 1
        settings, lane = self._settings, arrival.lane
        bound_tokens, bound_s = bound_of(settings, lane, self._memory_bytes)
        is_async = lane == "batch"
        job = Job(
            id=f"job-0-{self._num_jobs:032x}",
            tenant=arrival.tenant,
            model=MODEL,
            lane=lane,
            endpoint=Endpoint.COMPLETIONS,
            prompt_ids=prompt_of(arrival, self._num_jobs),
            params=SamplingParams(max_tokens=arrival.cap, seed=1, temperature=0.0),
            created_s=int(_EPOCH_S + self.now_s),
            session="" if "sessions" in self._without else arrival.session,
        )
        looks = self.fleet.options.prefix_caching and "residence" not in self._without
        return job, Submission(
            max_output_tokens=arrival.cap,
            deadline_s=settings.job_deadline_s if is_async else settings.sync_deadline_s,
            retention_s=settings.job_retention_s,
            lane_bound_tokens=bound_tokens,
            lane_bound_s=bound_s,
            needs_worker=not is_async,
            marks=marks_of(job) if looks else b"",
        )

    def _refuse(
        self, arrival: Arrival, arrival_s: float, num_tried: int, reason: str, wait_s: float | None
    ) -> None:
        """The caller comes again, or gives up."""
        self.outcome.refused(reason, wait_s)
        if num_tried < self._retries:
            if wait_s is None or not 0 < wait_s <= _MAX_RETRY_AFTER_S:
                wait_s = min(_BACKOFF_S[0] * 2**num_tried, _BACKOFF_S[1])
            self._num_coming += 1
            self._at(self.now_s + wait_s, self._submit, arrival, arrival_s, num_tried + 1)
        else:
            self.outcome.ended("refused")
            self._is_last()

    def _end_call(self, job_id: str, state: str) -> None:
        call = self._calls.pop(job_id, None)
        if call is None:
            return
        arrival = call.arrival
        self._ended.append((job_id, arrival.tenant))
        if len(self._ended) >= _MOST_ENDED:
            self.queue.delete(self._ended)
            self._ended.clear()
        self.outcome.ended(state)
        if state == JobStatus.SUCCEEDED:
            first_s = call.first_s if call.first_s is not None else self.now_s
            spent = arrival.lane, arrival.tenant, call.arrival_s, first_s, self.now_s
            is_later = bool(arrival.history)
            self.outcome.answered(*spent, arrival.output_tokens, is_later=is_later)
            if (turn := next_turn(arrival, call.prompt_ids, OUTPUT_ID)) is not None:
                self._num_coming += 1
                self._at(self.now_s + turn.arrival_s, self._begin_turn, turn)
        self._is_last()

    def _calls_tool(self, job_id: str) -> bool:
        return job_id in self._calls and self._calls[job_id].arrival.then is not None

    def _is_last(self) -> None:
        self._is_over = not (self._calls or self._num_coming)

    # --- workers ------------------------------------------------------------------------------

    def start_worker(self) -> None:
        """Starts a worker, which is ready when its model is loaded."""
        self.outcome.gpu_s += self.fleet.load_s
        self._at(self.now_s + self.fleet.load_s, self._worker_ready)

    def _worker_ready(self) -> None:
        if self._delayed(self._worker_ready):
            return
        self._num_workers += 1
        worker = Worker(self.fleet, self.queue, self._num_workers, lambda: self.now_s)
        self.workers[worker.name] = worker
        done(self.queue.starts.measured(MODEL, self.fleet.load_s))
        worker.beat(self.now_s)
        beat_s = worker.settings.heartbeat_s
        self._at(self.now_s + beat_s * self._rng.random(), self._beat, worker)
        self._claim(worker)

    def _beat(self, worker: Worker) -> None:
        if not worker.is_up or self._delayed(self._beat, worker):
            return
        self._report(worker)
        worker.beat(self.now_s)
        self._at(self.now_s + worker.settings.heartbeat_s, self._beat, worker)

    def _report(self, worker: Worker) -> None:
        """Logs the tokens that it has not logged."""
        self._append(
            worker,
            [job.item("") for job in worker.jobs.values() if job.num_tokens > job.num_logged],
        )

    def _append(self, worker: Worker, items: list[Append]) -> None:
        if not items:
            return
        for item, (verdict, _) in zip(items, done(worker.broker.append(items)), strict=True):
            job = worker.holding.get(item.job_id, item.epoch)
            if verdict == Verdict.OK and not item.fin:
                continue
            if job is not None:
                worker.holding.end(job, str(item.fin or verdict))
                worker.model.lengths.pop(item.job_id, None)
            if item.fin and "retention" not in self._without and self._calls_tool(item.job_id):
                worker.engine.stop_choice(item.job_id, item.epoch, 0, pauses=True)
            if verdict != Verdict.FENCED:
                self._end_call(item.job_id, item.fin or str(verdict))

    def _offer(self, lane: str, tenant: str) -> None:
        """Lets workers with room claim, until nothing waits."""
        if not self._hungry or not self._num_waiting:
            return
        names = list(self._hungry)
        start = self._rng.randrange(len(names))
        for name in names[start:] + names[:start]:
            if not self._num_waiting:
                return
            worker = self._hungry[name]
            if worker.rooms is None:
                self._claim(worker)
                continue
            room = worker.rooms.get(lane)
            # A full worker takes places from another tenant only.
            if room is not None and (
                room.max_jobs or (room.fair is not None and set(room.fair.held) - {tenant})
            ):
                self._claim(worker)

    def _claim(self, worker: Worker) -> None:
        if self.now_s < self._paused_until_s:
            return  # `_fence` claims for all when Redis answers again
        worker.due_s = -1.0
        if not worker.is_up or worker.drain.begun.is_set():
            return

        async def start(claimed: list[Claimed]) -> None:
            for each in claimed:
                self._start(worker, each)

        if self._num_waiting:
            over = worker.drain.begun.is_set
            worker.rooms = done(worker.claims.claim_while_room(start, over))
        else:  # a claim would find nothing
            worker.rooms = None
            if len(worker.jobs) < self.fleet.options.num_places:
                worker.link.speed.note_room()
        if worker.rooms is None or worker.rooms:
            self._hungry[worker.name] = worker
        else:
            self._hungry.pop(worker.name, None)
        rest_s = worker.claims.rest_s
        if rest_s < 1.0 and self._num_waiting and worker.due_s < self.now_s:
            worker.due_s = self.now_s + max(0.0, rest_s)
            self._at(worker.due_s, self._claim, worker)

    def _start(self, worker: Worker, claimed: Claimed) -> None:
        self._num_waiting -= 1
        call, job = self._calls[claimed.job.id], SimulatedJob(claimed)
        if claimed.epoch > 1:
            self.outcome.num_resumes += 1
            num_known = claimed.job.num_prompt_tokens + claimed.num_logged_tokens
            self.outcome.num_recomputed_tokens += num_known if claimed.num_logged_tokens else 0
        worker.holding.start(job)
        if call.arrival.output_tokens < call.arrival.cap:
            worker.model.lengths[claimed.job.id] = call.arrival.output_tokens
        deadline_s = self.now_s + claimed.deadline_s  # on the engine's clock
        at_s = self.now_s + self._rng.choice(self.fleet.overheads_s)
        self._at(at_s, self._enter, worker, job, deadline_s)

    def _enter(self, worker: Worker, job: SimulatedJob, deadline_s: float) -> None:
        if worker.holding.get(job.job.id, job.epoch) is not job or not worker.is_up:
            return
        worker.clock.now_s = self.now_s
        try:
            worker.engine.add(replace(job.start_message(), deadline_s=deadline_s))
        except RequestRefused:
            item = Append(job.job.id, job.epoch, job.next_number, fin=JobStatus.FAILED)
            self._append(worker, [item])
        self._step(worker)

    def _step(self, worker: Worker) -> None:
        if not worker.is_up or worker.stepping is not None:
            return
        worker.clock.now_s = self.now_s
        wake_s = worker.engine.next_wake_s()
        if wake_s is None:
            return
        if wake_s > self.now_s:
            if not self.now_s < worker.wake_s <= wake_s:
                worker.wake_s = wake_s
                self._at(wake_s, self._step, worker)
            return
        report = worker.engine.step()
        took_s = worker.clock.now_s - self.now_s
        if not took_s and not report.ended and not report.failed:
            self._at(self.now_s + _IDLE_S, self._step, worker)
            return
        worker.stepping = report
        worker.link.running = frozenset(worker.jobs)
        worker.link.steps.begin(self.now_s)
        report.step_s = took_s
        self._at(self.now_s + took_s, self._step_ends, worker, report)

    def _step_ends(self, worker: Worker, report: StepReport) -> None:
        if worker.stepping is not report:
            return  # it has died
        worker.stepping = None
        second = self.outcome.second(self.now_s)
        second.busy_s += report.step_s
        second.sequence_s += report.step_s * report.num_step_seqs
        second.num_tokens += len(report.outputs)
        self.outcome.num_looked_up += report.num_prefix_queries
        self.outcome.num_found += report.num_prefix_hits
        frees, changed = False, list[SimulatedJob]()
        jobs, calls = worker.jobs, self._calls
        for out in report.outputs:
            job = jobs.get(out.job_id)
            if job is None or job.epoch != out.epoch:
                continue
            job.count(out.finish_reason)
            if out.position == 0:
                calls[out.job_id].first_s = self.now_s
            if out.finish_reason is not None or out.position == 0:
                changed.append(job)
            if out.finish_reason is not None or job.num_tokens == job.job.params.max_tokens - 1:
                frees = True
        for ended in report.ended:  # resumed with its whole output
            job = jobs.get(ended.job_id)
            if job is not None and job.epoch == ended.epoch:
                job.finish(ended.finish_reason)
                changed.append(job)
        is_served = worker.link.note_step(report, self.now_s)
        if changed:
            self._log(worker, changed)
        self._step(worker)
        if frees or is_served:
            self._claim(worker)

    def _log(self, worker: Worker, changed: list[SimulatedJob]) -> None:
        """Logs what a step has begun or ended; later if Redis does not answer."""
        if not worker.is_up or self._delayed(self._log, worker, changed):
            return
        items = [
            job.item(JobStatus.SUCCEEDED if job.is_complete else "")
            for job in changed
            if worker.holding.get(job.job.id, job.epoch) is job
        ]
        self._append(worker, items)

    # --- faults -------------------------------------------------------------------------------

    def _break(self, fault: Fault) -> None:
        if fault.kind == "pause":
            self._paused_until_s = self.now_s + fault.seconds
            self._at(self._paused_until_s, self._fence, fault.seconds)
            return
        if fault.kind == "roll":
            self._roll(list(self.workers.values()))
            return
        ready = [worker for worker in self.workers.values() if not worker.drain.begun.is_set()]
        if not ready or self._delayed(self._break, fault):
            return
        worker = self._rng.choice(ready) if fault.worker is None else ready[fault.worker]
        if fault.kind == "kill":
            self._report(worker)  # production has logged each step
            self._gone(worker)
            self.start_worker()
        elif fault.kind == "spot":
            self._drain(worker)
            self.start_worker()
        else:
            self._engine_dies(worker)

    def _gone(self, worker: Worker) -> None:
        worker.is_up = False
        worker.stepping = None
        self.workers.pop(worker.name, None)
        self._hungry.pop(worker.name, None)
        self.outcome.gpu_s += self.now_s - worker.begun_s

    def _engine_dies(self, worker: Worker) -> None:
        self._report(worker)
        running = worker.link.running
        jobs = worker.holding.clear()
        worker.link.forget()
        worker.is_up = False
        worker.beat(self.now_s)
        self._hungry.pop(worker.name, None)
        free = [Release(j.job.id, j.epoch, "drain") for j in jobs if j.job.id not in running]
        blamed = [Blame(j.job.id, j.epoch, "{}") for j in jobs if j.job.id in running]
        verdicts = [*done(worker.broker.release(free)), *done(worker.broker.blame(blamed))]
        self._at(self.now_s + self.fleet.load_s, self._engine_ready, worker)
        self._given_back([*free, *blamed], verdicts)

    def _engine_ready(self, worker: Worker) -> None:
        worker.load_engine()
        worker.is_up = True
        self._beat(worker)
        self._claim(worker)

    def _drain(self, worker: Worker) -> None:
        """It takes no more jobs, and gives back those that have not ended in time."""
        if worker.drain.begin():
            self._hungry.pop(worker.name, None)
            worker.beat(self.now_s)
            self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        if self._delayed(self._leave, worker) or not worker.is_up:
            return
        if worker.jobs and worker.drain.running_s > 0:
            self._at(self.now_s + min(0.1, worker.drain.running_s), self._leave, worker)
            return
        self._report(worker)
        items = [Release(j.job.id, j.epoch, "drain") for j in worker.holding.clear()]
        verdicts = done(worker.broker.release(items))
        done(worker.broker.leave({}))
        self._gone(worker)
        self._given_back(items, verdicts)

    def _given_back(
        self, items: Iterable[Release | Blame], verdicts: Iterable[tuple[Verdict | JobStatus, int]]
    ) -> None:
        """Other workers may take what was given back; some of it may have failed instead."""
        for item, (verdict, _) in zip(items, verdicts, strict=True):
            if verdict in TERMINAL_STATUSES:
                self._end_call(item.job_id, str(verdict))
        self._count_waiting()

    def _roll(self, old: list[Worker]) -> None:
        """Replaces workers one after another, each when its successor is ready."""
        if old:
            self.start_worker()
            self._at(self.now_s + self.fleet.load_s, self._drain, old[0])
            self._at(self.now_s + self.fleet.load_s, self._roll, old[1:])

    def _fence(self, seconds: float) -> None:
        """A worker without Redis for longer than its leases allow has dropped its jobs."""
        for worker in list(self.workers.values()):
            if seconds > worker.settings.self_fence_s:
                for job in list(worker.holding.jobs.values()):
                    worker.holding.drop(job)
            self._at(self.now_s, self._claim, worker)

    def _sweep(self) -> None:
        num_sweeps = min(max(1, len(self.workers)), _MAX_SWEEPS_PER_S)
        self._at(max(self.now_s, self._paused_until_s) + 1.0 / num_sweeps, self._sweep)
        if self.now_s < self._paused_until_s:
            return
        swept = done(self.queue.functions.sweep())
        if swept.num_expired:
            self._find_expired()
        if swept.num_lapsed:
            self._count_waiting()

    def _find_expired(self) -> None:
        """Ends the calls whose jobs the sweep has ended, the earliest deadline first."""
        while self._deadlines and self._deadlines[0][0] <= self.now_s:
            job_id = self._deadlines[0][1]
            if (call := self._calls.get(job_id)) is not None:
                found = done(self.queue.functions.read(job_id, call.arrival.tenant))
                if found is not None and not found[0].is_terminal:
                    return  # by a later sweep
                self._end_expired(job_id)
            heapq.heappop(self._deadlines)
        self._count_waiting()

    def _end_expired(self, job_id: str) -> None:
        for worker in self.workers.values():
            if (job := worker.jobs.get(job_id)) is not None:
                worker.holding.end(job, JobStatus.EXPIRED)
        self._end_call(job_id, JobStatus.EXPIRED)

    def _count_waiting(self) -> None:
        """Counts the jobs that wait, and lets workers with room claim them."""
        lanes = sorted({call.arrival.lane for call in self._calls.values()})
        seen = done(self.queue.functions.snapshot(MODEL, lanes))
        self._num_waiting = sum(lane.num_queued for lane in seen.lanes.values())
        for worker in list(self._hungry.values()):
            if self._num_waiting and worker.is_up:
                self._claim(worker)

    # --- the pool -----------------------------------------------------------------------------

    def _start_pool(self, policy: PoolPolicy) -> None:
        watch = PoolWatch(self.queue.client, self.queue.keys, MODEL, tuple(policy.wait_targets_s))
        workforce = _Workforce(self, self.fleet.num_workers)
        functions = self.queue.functions
        service = PoolService(policy, watch, functions, workforce, clock_s=lambda: self.now_s)
        self._at(0.0, self._size, service)

    def _size(self, service: PoolService) -> None:
        self._at(self.now_s + EVERY_S, self._size, service)
        if self.now_s < self._paused_until_s:
            return
        decision, retired = service.size(done(service.watch.look()))
        for name in retired:
            if name in self.workers:
                self._drain(self.workers[name])
        if decision.eta_s:
            done(self.queue.starts.announce(MODEL, decision.eta_s))
