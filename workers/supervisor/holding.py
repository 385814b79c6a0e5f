"""The jobs that this worker holds, and its connection to the engine that runs them.

The supervisor's tasks share both. Does not use Redis.

Measures how fast this worker is: gateways predict waiting times from its rate, and the times of
its steps say when to claim. A job claimed during a step starts in the next step, no matter when in
the step it was claimed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache
from msgspec.structs import replace

from contract.function_types import MAX_CLAIM, LaneRoom, Release, WorkerCapacity
from contract.jobs import JobStatus
from contract.telemetry.tracing import Tracing
from workers.ipc.channel import EngineClient
from workers.ipc.messages import EngineLoad, EngineOptions, EngineReady, StopJob, ToEngine
from workers.lanes import Lane
from workers.supervisor.displacing import HeldPlaces, rooms_by_lane
from workers.supervisor.held_job import HeldJob
from workers.supervisor.metrics import JobSpans

_MIN_WINDOW_S = 1.0
_NEWEST_WINDOW = 0.5  # weight of the newest measurement in the average
_NEWEST_STEP = 0.05


class Speed:
    """The rate at which a full worker serves the cost of jobs, in tokens per second.

    A measurement with room left can raise the rate but not lower it.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0: not measured yet
        self._step_s = 0.0
        self._window: tuple[float, int] | None = None  # its start (s), and the total drained then
        self._had_room = True

    def begin(self, tokens_per_s: float) -> None:
        """Takes what the engine has measured as it was loaded (0: nothing), until more is known."""
        self.tokens_per_s = self.tokens_per_s or tokens_per_s

    def note_step(self, step_s: float) -> None:
        """Records a step, which gave each stream one token."""
        share = _NEWEST_STEP if self._step_s else 1.0
        self._step_s += share * (step_s - self._step_s)

    def note_room(self) -> None:
        """Records that the worker could do more: there was room and no job to fill it, or a lane
        gave way."""
        self._had_room = True

    def measure(self, now_s: float, num_drained: int, *, has_room: bool) -> None:
        """Ends the window unless it is too short. `num_drained`: tokens served since the start."""
        if self._window is not None:
            start_s, drained_before = self._window
            if now_s - start_s < _MIN_WINDOW_S:
                return
            rate = (num_drained - drained_before) / (now_s - start_s)
            if not (self._had_room or has_room):
                share = _NEWEST_WINDOW if self.tokens_per_s else 1.0
                self.tokens_per_s += share * (rate - self.tokens_per_s)
            elif self.tokens_per_s:
                self.tokens_per_s = max(self.tokens_per_s, rate)
        self._window = now_s, num_drained
        self._had_room = has_room

    def capacity(
        self, max_tokens: int, max_jobs: int, lane_shares: Mapping[str, float]
    ) -> WorkerCapacity:
        """The capacity that a heartbeat reports."""
        stream_rate = 1 / self._step_s if self._step_s else 0.0
        rates = round(self.tokens_per_s, 3), round(stream_rate, 3)
        return WorkerCapacity(*rates, max_tokens, max_jobs, tuple(lane_shares), lane_shares)


_MIN_PROMPT_TOKENS = 64  # of a step that says what a prompt's token takes
_PROMPT_TOKEN_S = 1e-3  # until one has said it


class PromptSpeed:
    """What a token of a prompt takes, by the steps that computed some."""

    def __init__(self) -> None:
        self.token_s = _PROMPT_TOKEN_S
        self._is_known = False

    def note(self, load: EngineLoad) -> None:
        num_tokens = load.num_step_tokens - load.num_decode_tokens
        if num_tokens >= _MIN_PROMPT_TOKENS:
            token_s = load.step_s / load.num_step_tokens
            share = _NEWEST_STEP if self._is_known else 1.0
            self.token_s += share * (token_s - self.token_s)
            self._is_known = True


_NUM_STEPS = 8  # the shortest of the last steps predicts the current one
# The claim is made before the end of the step by the largest of:
_MIN_LEAD_S = 0.02
_LEAD_SHARE = 0.1  # of the step
_LEAD_CLAIMS = 3.0  # recent claim durations
_CLAIM_DECAY = 0.9  # of the recent claim duration, with each shorter claim


class StepClock:
    """Predicts the end of the current step from earlier ones."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._claim_s = 0.0

    def begin(self, now_s: float) -> None:
        """Records that a step begins."""
        self._began_s = now_s

    def end(self, step_s: float) -> None:
        """Records that the step ended after `step_s` seconds."""
        self._began_s = None
        self._steps_s.append(step_s)

    def note_claim(self, took_s: float) -> None:
        """Records a claim's duration, including the messages to the engine."""
        self._claim_s = max(took_s, _CLAIM_DECAY * self._claim_s)

    @property
    def claim_deadline_s(self) -> float:
        """Latest time to claim a job that starts in the next step; -inf if no step is running or
        the length of steps is unknown."""
        if self._began_s is None or not self._steps_s:
            return -math.inf
        step_s = min(self._steps_s)
        lead_s = max(_MIN_LEAD_S, _LEAD_SHARE * step_s, _LEAD_CLAIMS * self._claim_s)
        return self._began_s + step_s - lead_s


# Most outputs end before their cap, and the engine can preempt. So a worker claims up to twice the
# tokens that its KV cache holds, counting each job up to its cap.
_OVERCOMMIT = 2
_MAX_EPOCHS = 10_000  # remembered at most
_MAX_CANCELLED = 1024  # remembered at most
_IDLE = EngineLoad()


@dataclass(slots=True)
class EngineLink:
    """The current engine. `running` holds the job ids of its current step; `changed` is set when an
    engine has loaded its model, and when it has ended. `load_s`: what the last load took."""

    options: EngineOptions  # including batching.yaml
    client: EngineClient | None = None
    ready: EngineReady | None = None
    load: EngineLoad = _IDLE
    running: frozenset[str] = frozenset()
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    load_s: float = 0.0
    speed: Speed = field(default_factory=Speed)
    prompts: PromptSpeed = field(default_factory=PromptSpeed)
    steps: StepClock = field(default_factory=StepClock)

    @property
    def num_places(self) -> int:
        """Sequences that the engine runs at a time; 0 before it is ready."""
        return (self.ready.max_num_seqs or self.options.num_places) if self.ready else 0

    def note_step(self, load: EngineLoad, now_s: float) -> bool:
        """Records a step that has ended, and that the next one begins. Returns whether a lane no
        longer waits in the engine, so that jobs of it may be claimed."""
        is_served = bool(set(self.load.waiting_lanes) - set(load.waiting_lanes))
        self.load = load
        if load.num_step_tokens:
            self.speed.note_step(load.step_s)
            self.steps.end(load.step_s)
            self.prompts.note(load)
        if load.gives_way:
            self.speed.note_room()
        if load.num_running:
            self.steps.begin(now_s)
        return is_served

    def send(self, messages: Sequence[ToEngine]) -> None:
        """Sends one frame; does nothing without an engine."""
        if self.client is not None:
            self.client.send(messages)

    def forget(self) -> None:
        """Forgets the engine, which has ended."""
        self.client, self.ready, self.load, self.running = None, None, _IDLE, frozenset()
        self.steps = StepClock()
        self.changed.set()


@dataclass(slots=True)
class Holding:
    """The held jobs by id. `wake` is set when there may be room, `job_left` when a job was dropped.

    `tokens_after_cancel` counts tokens that were computed for cancelled jobs and not yet logged.
    """

    engine: EngineLink
    jobs: dict[str, HeldJob] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    job_left: asyncio.Event = field(default_factory=asyncio.Event)
    spans: JobSpans = field(default_factory=lambda: JobSpans(Tracing("batchway-worker")))
    tokens_after_cancel: int = 0
    has_warm_offer: bool = False  # a prompt to compute while nothing is held
    _num_drained: int = 0  # served of jobs that left, less what others served before they came
    _cancelled: LRUCache[tuple[str, int], bool] = field(
        default_factory=lambda: LRUCache(_MAX_CANCELLED)
    )
    # The latest epoch of each job that was started here.
    _epochs: LRUCache[str, int] = field(default_factory=lambda: LRUCache(_MAX_EPOCHS))

    def start(self, job: HeldJob, *, is_first: bool = False) -> None:
        """Adds a job. `is_first`: no worker has run it before."""
        self.jobs[job.job.id] = job
        self.spans.note_claim(job, is_first=is_first)
        self._num_drained -= job.num_drained
        self._epochs[job.job.id] = job.epoch

    def has_started(self, job_id: str, epoch: int) -> bool:
        """Whether the job was started here under this or a later epoch. Output of that run may
        still arrive and would seem to belong to the new run."""
        return epoch <= self._epochs.get(job_id, 0)

    def get(self, job_id: str, epoch: int) -> HeldJob | None:
        """The job, if it is held under this epoch."""
        job = self.jobs.get(job_id)
        return job if job is not None and job.epoch == epoch else None

    @property
    def num_drained(self) -> int:
        """Tokens of job cost that this worker has served since it started."""
        return self._num_drained + sum(job.num_drained for job in self.jobs.values())

    def end(self, job: HeldJob, status: JobStatus | str, num_unlogged: int = 0) -> None:
        """Drops a job that ended in Redis. `num_unlogged`: tokens of its refused append."""
        if status == JobStatus.CANCELLED:
            self.tokens_after_cancel += num_unlogged
            if self.get(job.job.id, job.epoch) is not None:
                self.tokens_after_cancel += job.num_unlogged_tokens
                self._cancelled[(job.job.id, job.epoch)] = True
        self.drop(job, str(status))

    def count_late(self, job_id: str, epoch: int) -> None:
        """Counts a token computed for a cancelled job before the engine stopped it."""
        self.tokens_after_cancel += (job_id, epoch) in self._cancelled

    def drop(self, job: HeldJob, how: str = "lost") -> None:
        """Forgets a job that has ended or was lost."""
        if self.get(job.job.id, job.epoch) is None:
            return
        del self.jobs[job.job.id]
        self.spans.note_end(job, how)
        self._num_drained += job.num_drained
        if not job.is_complete:
            self.engine.send([StopJob(job.job.id, job.epoch)])
        self.wake.set()
        self.job_left.set()

    def clear(self) -> list[HeldJob]:
        """Forgets and returns all jobs without stopping them in the engine."""
        jobs = list(self.jobs.values())
        self._num_drained = self.num_drained
        for job in jobs:
            self.spans.note_end(job, "given back")
        self.jobs.clear()
        self.job_left.set()
        return jobs

    @property
    def max_tokens(self) -> int:
        """Largest total job cost that this worker holds; 0 before its engine is ready."""
        ready = self.engine.ready
        return _OVERCOMMIT * ready.num_blocks * ready.block_size if ready is not None else 0

    def capacity(self, now_s: float, lanes: Mapping[str, float]) -> WorkerCapacity:
        """The capacity that a heartbeat reports. `lanes`: name to minimum share."""
        speed = self.engine.speed
        speed.measure(now_s, self.num_drained, has_room=self.room(now_s) is not None)
        return speed.capacity(self.max_tokens, self.engine.num_places, lanes)

    def rest_s(self, now_s: float, checked_s: float) -> float:
        """Seconds until the places that the current step frees must be claimed; infinite if it
        frees none, or if room was checked after that time, at `checked_s`."""
        claim_deadline_s = self.engine.steps.claim_deadline_s
        has_ending = any(job.num_continuing < job.num_open for job in self.jobs.values())
        return claim_deadline_s - now_s if has_ending and checked_s < claim_deadline_s else math.inf

    def offers(self) -> list[Release]:
        """Offers whole jobs that wait in the engine, as at the last look. Called once a second. One
        that was returned before waits longer: a worker only estimates its room."""
        engine, jobs = self.engine, list(self.jobs.values())
        lanes = engine.load.waiting_lanes if self._displaces else ()
        for job in jobs:
            can_leave = job.lane in lanes and not (job.is_alone or job.is_complete)
            is_waiting = can_leave and job.job.id not in engine.running
            job.num_looks = job.num_looks + 1 if is_waiting else 0
        waiting = [job for job in jobs if job.num_looks > 2 ** min(5, job.num_returns)]
        return [Release(job.job.id, job.epoch, "offer") for job in waiting[:MAX_CLAIM]]

    def room(self, now_s: float) -> LaneRoom | None:
        """What this worker could start at present; None if it should not claim. After the claim
        deadline of a step, the places that the step frees count as room."""
        ready = self.engine.ready
        if ready is None or (self.jobs and self.engine.load.num_waiting > 0):
            return None
        max_jobs = self.engine.num_places
        if not self.jobs:
            # An idle worker claims a job of any size. The engine fails a job that can never fit,
            # which would otherwise wait for ever.
            return LaneRoom(min(max_jobs, MAX_CLAIM), 2**53)
        if any(job.is_alone for job in self.jobs.values()):
            return None
        max_jobs -= sum(self._places(now_s).values())
        held_tokens = sum(job.held_tokens for job in self.jobs.values())
        max_tokens = self.max_tokens - held_tokens
        if max_jobs <= 0 or max_tokens <= 0:
            return None
        return LaneRoom(min(max_jobs, MAX_CLAIM), max_tokens)

    def rooms(self, terms: Mapping[str, Lane], now_s: float) -> dict[str, LaneRoom]:
        """Returns `room` for each lane; lanes without room are missing."""
        room, ready = self.room(now_s), self.engine.ready
        if ready is None or not self.jobs or not self._displaces:
            return {} if room is None else dict.fromkeys(terms, room)
        if any(job.is_alone for job in self.jobs.values()):
            return {}
        places = self._places(now_s)
        held = [
            HeldPlaces(j.lane, j.job.tenant, places[j.job.id], j.held_tokens)
            for j in self.jobs.values()
        ]
        whole = LaneRoom(self.engine.num_places, self.max_tokens)
        rooms = rooms_by_lane(terms, held, self.engine.load.waiting_lanes, whole)
        return {
            name: replace(lane, max_jobs=min(lane.max_jobs, MAX_CLAIM))
            for name, lane in rooms.items()
        }

    def _places(self, now_s: float) -> dict[str, int]:
        """Places that each job occupies; after the claim deadline, its places in the next step."""
        if now_s >= self.engine.steps.claim_deadline_s:
            return {job_id: job.num_continuing for job_id, job in self.jobs.items()}
        return {job_id: job.num_open for job_id, job in self.jobs.items()}

    @property
    def _displaces(self) -> bool:
        """Whether the engine admits sequences at every step; fixed batches do not."""
        options = self.engine.options
        strategies = [options.strategy, *(lane.strategy for lane in options.lanes)]
        return all(s is None or s.name == "continuous" for s in strategies)
