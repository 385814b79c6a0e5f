"""A worker of a simulation: production's claims, holding and engine, without processes."""

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from contract.events import ChoiceDelta, Tokens
from contract.function_types import Append, Claimed, LaneRoom
from contract.jobs import FinishReason, JobStatus
from contract.model_cards import TokenizerFiles
from contract.residence import prefix_marks
from infra.planning.costs import Costs
from infra.planning.engine import OUTPUT_ID, CostedModel, VirtualClock
from infra.planning.queue import VirtualQueue, done
from infra.pool import PoolPolicy
from workers.engine.step_plan import StepReport
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions, EngineReady, StopJob, ToEngine
from workers.settings import WorkerSettings
from workers.supervisor.claims import Claims
from workers.supervisor.drain import Drain
from workers.supervisor.held_job import Choice, HeldJob
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.worker_broker import WorkerBroker

if TYPE_CHECKING:
    from workers.ipc.channel import EngineClient

MODEL = "simulated"
_VOCABULARY = 2**31 - 1
_NO_TOKENIZER = TokenizerFiles(tokenizer_json="", chat_template=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Workers that are alike. `load_s`: from the start of one to its first claim. With a `policy`
    their number follows the work; without, there are `num_workers`."""

    costs: Costs
    num_blocks: int
    options: EngineOptions
    num_workers: int = 1
    block_size: int = 16
    step_tokens: int = 2048
    max_model_len: int = 32768
    # Of a job from its claim to the engine, and of its first token to the log: drawn from these.
    overheads_s: tuple[float, ...] = (0.002,)
    wakes_s: tuple[float, ...] = (0.001,)  # from a submission to a worker's claim
    load_s: float = 60.0
    policy: PoolPolicy | None = None


class SimulatedJob(HeldJob):
    """A held job whose tokens have numbers and no text."""

    def __init__(self, claimed: Claimed) -> None:
        super().__init__(claimed, cast(Any, None))
        self.num_logged = claimed.num_logged_tokens
        self.num_tokens = self.num_logged
        self._choices[0].token_ids = cast(Any, range(1, self.num_tokens + 1))

    def _new_choice(self, *_: object) -> Choice:
        return Choice(cast(Any, None), None)

    def count(self, finish_reason: FinishReason | None) -> None:
        self.num_tokens += 1
        self._choices[0].token_ids = cast(Any, range(1, self.num_tokens + 1))
        self.finish(finish_reason)

    def finish(self, finish_reason: FinishReason | None) -> None:
        self._choices[0].finish_reason = finish_reason

    def held_marks(self) -> bytes:
        ids = (*self.job.prompt_ids, *(OUTPUT_ID,) * (self.num_tokens - 1))
        return prefix_marks(self.job.tenant, ids)

    def item(self, fin: Literal["", JobStatus.SUCCEEDED]) -> Append:
        """What it has computed and not yet reported."""
        num_new, self.num_logged = self.num_tokens - self.num_logged, self.num_tokens
        event = Tokens((ChoiceDelta(0, self.num_tokens - num_new, (), ""),)) if num_new else None
        number = self.next_number
        self.next_number += event is not None
        held = self.held_marks() if fin else b""
        return Append(self.job.id, self.epoch, number, event, num_new, fin, held=held)


class _Link:
    """In place of the engine's process: stops jobs in the engine."""

    def __init__(self, stop: Callable[[str, int], None]) -> None:
        self._stop = stop

    def send(self, messages: Seq[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, StopJob):
                self._stop(message.job_id, message.epoch)


class Worker:
    """A worker: its engine, what it holds, and its calls of the queue."""

    def __init__(self, fleet: Fleet, queue: VirtualQueue, number: int, now_s: Callable[[], float]):
        self.fleet = fleet
        self.clock = VirtualClock()
        settings = WorkerSettings(redis_url="", served_model_name=MODEL, engine=fleet.options)
        self.settings = settings
        self.name = f"worker-{number}"
        self.broker = WorkerBroker(settings, self.name, now_s, queue.client)
        self.link = EngineLink(fleet.options)
        self.holding = Holding(self.link)
        self.claims = Claims(settings, self.broker, self.holding, now_s)
        self.lanes = {
            name: lane.min_share for name, lane in settings.lane_terms(fleet.options).items()
        }
        self.drain = Drain(settings.drain_s, settings.drain_release_s, now_s)
        self.is_up = True
        self.begun_s = now_s()
        self.rooms: dict[str, LaneRoom] | None = {}  # that it has left to fill; None: not known
        self.stepping: StepReport | None = None
        self.due_s = self.wake_s = -1.0  # of a claim, and of a step, that are planned
        self.load_engine()

    def load_engine(self) -> None:
        fleet, options = self.fleet, self.fleet.options
        self.model = CostedModel(
            fleet.costs, self.clock, fleet.num_blocks, fleet.block_size, fleet.max_model_len
        )
        self.engine = build_engine(
            self.model, _VOCABULARY, options, fleet.step_tokens, clock_s=self.clock
        )
        self.link.client = cast("EngineClient", _Link(self.engine.stop_job))
        self.link.ready = EngineReady(
            fleet.max_model_len, _VOCABULARY, (), _NO_TOKENIZER, fleet.num_blocks, fleet.block_size
        )  # fmt: skip
        self.stepping = None

    @property
    def jobs(self) -> dict[str, SimulatedJob]:
        return cast(dict[str, SimulatedJob], self.holding.jobs)

    def beat(self, now_s: float) -> None:
        state = "draining" if self.drain.begun.is_set() else "up" if self.is_up else "loading"
        held = [(job.job.id, job.epoch) for job in self.jobs.values()]
        load = self.link.load
        num_blocks = self.fleet.num_blocks
        info = {"num_blocks": num_blocks, "num_free_blocks": load.num_free_blocks or num_blocks}
        capacity = self.holding.capacity(now_s, self.lanes)
        for job_id in done(
            self.broker.heartbeat(held, json.dumps(info), cast(Any, state), capacity, {})
        ):
            self.holding.drop(self.jobs[job_id])
