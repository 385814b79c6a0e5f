"""Everything a supervisor may do, in any order: the tokens are the oracle's, and every limit
holds."""

import dataclasses

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from contract.jobs import SamplingParams
from tests.workers.engine.harness import (
    Harness,
    Prompts,
    Sizes,
    all_params,
    all_prompts,
    all_sizes,
    oracle,
)
from tests.workers.engine.test_engine_properties import cut, is_possible, request_of
from tests.workers.engine.witness import Witness
from tests.workers.strategies.test_strategies import all_strategies
from workers.engine.sequence import RequestRefused
from workers.engine.strategy import Strategies, Strategy
from workers.ipc.messages import Request
from workers.lanes import Lane

LANES = ("interactive", "standard", "batch")


def all_lanes() -> st.SearchStrategy[list[Lane]]:
    """Three lanes with any priorities, targets, shares and ages."""
    numbers = st.tuples(
        st.integers(0, 2),
        st.sampled_from((None, 0.004, 0.1)),
        st.sampled_from((0.0, 0.05, 0.33)),
        st.sampled_from((5, 40, 300)),
    )
    return st.tuples(numbers, numbers, numbers).map(
        lambda rows: [Lane(name, *row) for name, row in zip(LANES, rows, strict=True)]
    )


class SupervisorAndEngine(RuleBasedStateMachine):
    """`Harness.step` audits blocks and budget, `Witness` the high-water mark, order and
    starvation."""

    jobs: Bundle[Request] = Bundle("jobs")

    @initialize(
        sizes=all_sizes(),
        strategy=all_strategies(),
        lanes=all_lanes(),
        token_s=st.sampled_from((0.0, 0.001)),
    )
    def build(
        self,
        sizes: Sizes,
        strategy: Strategy,
        lanes: list[Lane],
        token_s: float,
    ) -> None:
        self.harness = Harness(sizes, strategy, lanes=lanes, token_s=token_s)
        self.witness = Witness(self.harness)
        self.harness.watch = self.witness.watch
        self.num_jobs = 0
        self.due: dict[str, Request] = {}
        self.stopped: set[tuple[str, int]] = set()
        self.deadlines_s: dict[str, float] = {}

    @rule(
        target=jobs,
        prompts=all_prompts(),
        params=all_params(),
        lane=st.sampled_from(LANES),
        tenant=st.sampled_from(("ada", "bob", "eve")),
        num_kept=st.sampled_from((0, 0, 3, 25)),
        seconds=st.sampled_from((None, None, 0.0, 0.05, 3.0)),
    )
    def add(
        self,
        prompts: Prompts,
        params: SamplingParams,
        lane: str,
        tenant: str,
        num_kept: int,
        seconds: float | None,
    ) -> Request | MultipleResults[Request]:
        """A job of any lane and tenant, possibly with the first tokens of its choices."""
        self.num_jobs += 1
        request = request_of(f"job-{self.num_jobs}", prompts, params)
        request = msgspec.structs.replace(request, lane=lane, tenant=tenant)
        if not is_possible(request, self.harness.sizes):
            with pytest.raises(RequestRefused):
                self.harness.add(request)
            return multiple()
        if seconds is not None:
            self.deadlines_s[request.job_id] = self.harness.clock_s() + seconds
        return self.take(cut(request, num_kept))

    @rule(target=jobs, old=consumes(jobs), num_kept=st.integers(0, 25))
    def rerun(self, old: Request, num_kept: int) -> Request:
        """The job's lease expired and it was claimed here again with a newer epoch."""
        self.stopped -= {(old.job_id, choice) for choice in range(len(old.outputs))}
        return self.take(cut(msgspec.structs.replace(old, epoch=old.epoch + 1), num_kept))

    def take(self, request: Request) -> Request:
        deadline_s = self.deadlines_s.get(request.job_id)
        request = msgspec.structs.replace(request, deadline_s=deadline_s)
        self.harness.add(request)
        self.due[request.job_id] = request
        return request

    @rule(request=jobs)
    def add_a_fenced_epoch(self, request: Request) -> None:
        """A late command of an older attempt changes nothing while a newer one runs."""
        if request.job_id in self.due and not self.has_ended(request):
            self.harness.engine.add(msgspec.structs.replace(request, epoch=request.epoch - 1))
        self.harness.engine.stop_job(request.job_id, request.epoch - 1)
        self.harness.engine.stop_choice(request.job_id, request.epoch - 1, 0)

    @rule(request=consumes(jobs))
    def stop_job(self, request: Request) -> None:
        self.harness.engine.stop_job(request.job_id, request.epoch)
        self.due.pop(request.job_id, None)

    @rule(request=jobs, choice=st.integers(0, 5), pauses=st.booleans())
    def stop_choice(self, request: Request, choice: int, pauses: bool) -> None:
        self.harness.engine.stop_choice(request.job_id, request.epoch, choice, pauses=pauses)
        self.stopped.add((request.job_id, choice))

    @rule(request=jobs)
    def preempt(self, request: Request) -> None:
        """As memory pressure does, at any time."""
        self.harness.engine.preempt(request.job_id)

    @rule()
    def evict(self) -> None:
        self.harness.engine.evict_cache()

    @rule(request=jobs, lane=st.sampled_from(LANES))
    def reprioritise(self, request: Request, lane: str) -> None:
        deadline_s = self.deadlines_s.get(request.job_id)
        self.harness.engine.reprioritise(request.job_id, request.epoch, lane, deadline_s)

    @rule(
        lanes=all_lanes(),
        default=all_strategies(),
        batch=all_strategies(),
        budget=st.integers(1, 40),
        high_water=st.sampled_from((0.1, 0.5, 1.0)),
    )
    def reconfigure(
        self,
        lanes: list[Lane],
        default: Strategy,
        batch: Strategy,
        budget: int,
        high_water: float,
    ) -> None:
        """Other lanes, strategies and limits; running sequences continue."""
        sizes = dataclasses.replace(
            self.harness.sizes, max_num_batched_tokens=budget, kv_high_water=high_water
        )
        self.harness.reconfigure(sizes, Strategies(default, {"batch": batch}), lanes)
        self.witness.forget_turns()

    @rule(seconds=st.sampled_from((0.001, 0.03, 1.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.harness.now_s += seconds

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_once()

    def step_once(self) -> None:
        """One step. Jobs fail only by their deadlines, and none runs past its own."""
        start_s = self.harness.clock_s()
        self.witness.look()
        report = self.harness.step()
        for error in report.failed:
            assert self.deadlines_s[error.job_id] <= start_s
            del self.due[error.job_id]
        for sequence in self.harness.engine.sequences:
            assert sequence.deadline_s is None or sequence.deadline_s > start_s

    @precondition(lambda self: hasattr(self, "harness"))
    @invariant()
    def blocks_are_owned_once(self) -> None:
        self.harness.engine.audit()

    def has_ended(self, request: Request) -> bool:
        keys = {(request.job_id, choice) for choice in range(len(request.outputs))}
        return keys <= self.harness.reasons.keys() | self.stopped

    def teardown(self) -> None:
        """Runs everything left to its end, with the same checks."""
        if not hasattr(self, "harness"):
            return
        for _ in range(20_000):
            if not self.harness.engine.has_work:
                break
            self.harness.sleep()
            self.step_once()
        self.harness.run(0)
        for request in self.due.values():
            for key, (token_ids, reason) in oracle(request).items():
                output_ids = self.harness.output_ids[key]
                assert output_ids == token_ids[: len(output_ids)]
                if key not in self.stopped:
                    assert output_ids == token_ids
                    assert self.harness.reasons[key] == reason


TestSupervisorAndEngine = pytest.mark.campaign(SupervisorAndEngine.TestCase)
TestSupervisorAndEngine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)
