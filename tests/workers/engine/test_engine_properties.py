"""What holds for every workload: the same tokens, no block lost, no limit passed, an end.

The state machine mixes all that a supervisor may do; the other tests name one promise each.
"""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from contract.jobs import SamplingParams
from tests.workers.engine.harness import (
    MAX_MODEL_LEN,
    Harness,
    Sizes,
    all_params,
    all_prompts,
    all_sizes,
    oracle,
)
from workers.engine.lanes import DEFAULT_LANES
from workers.engine.lengths import RecentLengths
from workers.engine.policies import (
    Composed,
    FirstComeFirstServed,
    LeastLaxity,
    Policy,
    ShortestPredictedFirst,
    VirtualTokenCounters,
)
from workers.engine.request import Request, RequestRefused


def all_policies() -> st.SearchStrategy[Policy]:
    """Fresh ones: some keep account."""
    lengths = RecentLengths(num_needed=2)
    parts: list[Callable[[], Policy]] = [
        VirtualTokenCounters,
        lambda: ShortestPredictedFirst(lengths),
        lambda: LeastLaxity(lengths, token_s=0.01),
        FirstComeFirstServed,
    ]
    chosen = st.lists(st.sampled_from(parts), max_size=3)
    return chosen.map(lambda makers: Composed(*(make() for make in makers)))


Workload = list[tuple[tuple[int, ...], SamplingParams]]

workloads = st.lists(st.tuples(all_prompts(), all_params()), min_size=1, max_size=6)
quick = settings(max_examples=150, deadline=None, derandomize=True)


def request_of(
    job_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, epoch: int = 1
) -> Request:
    num = params.n
    return Request(job_id, epoch, "t", "lane", prompt_ids, params, ((),) * num, (False,) * num)


def is_possible(request: Request, sizes: Sizes) -> bool:
    """Whether a job can run alone, said independently of the engine."""
    num_known = min(len(request.prompt_ids) + request.params.max_tokens, MAX_MODEL_LEN)
    return len(request.prompt_ids) < MAX_MODEL_LEN and num_known - 1 <= sizes.num_kv_tokens


def cut(request: Request, num_kept: int, finishes: bool = False) -> Request:
    """The job as it comes back after `num_kept` tokens of each choice were logged."""
    outputs = [token_ids for token_ids, _ in oracle(request).values()]
    return dataclasses.replace(
        request,
        outputs=tuple(tuple(token_ids[:num_kept]) for token_ids in outputs),
        finished=tuple(finishes and len(token_ids) <= num_kept for token_ids in outputs),
    )


def add_all(harness: Harness, workload: Workload) -> list[Request]:
    """Adds the possible jobs and returns them; asserts that just the others are refused."""
    taken = []
    for number, (prompt_ids, params) in enumerate(workload):
        request = request_of(f"job-{number}", prompt_ids, params)
        if is_possible(request, harness.sizes):
            harness.add(request)
            taken.append(request)
        else:
            with pytest.raises(RequestRefused):
                harness.add(request)
    return taken


def assert_oracle(harness: Harness, requests: list[Request]) -> None:
    expected = {key: end for request in requests for key, end in oracle(request).items()}
    assert harness.output_ids == {key: token_ids for key, (token_ids, _) in expected.items()}
    assert harness.reasons == {key: reason for key, (_, reason) in expected.items()}


@quick
@given(workload=workloads, sizes=all_sizes())
def test_any_budget_and_block_count_yields_the_same_tokens(
    workload: Workload, sizes: Sizes
) -> None:
    """Chunks, preemptions and neighbours change when a token comes, never which."""
    harness = Harness(sizes)
    requests = add_all(harness, workload)

    harness.run()

    assert_oracle(harness, requests)
    assert harness.model.max_step_tokens <= sizes.max_num_batched_tokens


@quick
@given(workload=workloads, sizes=all_sizes(), delays=st.lists(st.integers(0, 5), max_size=6))
def test_any_arrival_order_yields_the_same_tokens(
    workload: Workload, sizes: Sizes, delays: list[int]
) -> None:
    """Jobs that come while others run are no different from jobs that come together."""
    harness = Harness(sizes)
    requests = []
    for number, (prompt_ids, params) in enumerate(workload):
        request = request_of(f"job-{number}", prompt_ids, params)
        if is_possible(request, sizes):
            harness.add(request)
            requests.append(request)
        for _ in range(delays[number] if number < len(delays) else 0):
            harness.step()

    harness.run()

    assert_oracle(harness, requests)


@quick
@given(
    prompt_ids=all_prompts(),
    params=all_params(),
    num_kept=st.integers(0, 25),
    finishes=st.booleans(),
    sizes=all_sizes(),
)
def test_a_resume_from_any_cut_goes_on_with_the_same_tokens(
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    num_kept: int,
    finishes: bool,
    sizes: Sizes,
) -> None:
    """Another worker that knows the first k tokens yields just the rest, at the right places."""
    request = request_of("job", prompt_ids, params)
    if not is_possible(request, sizes):
        return
    harness = Harness(sizes)
    resumed = cut(request, num_kept, finishes)
    harness.add(resumed)

    harness.run()

    for key, (token_ids, reason) in oracle(request).items():
        assert harness.output_ids[key] == token_ids
        was_finished = resumed.finished[key[1]]
        assert harness.reasons.get(key) == (None if was_finished else reason)


@quick
@given(prompt_ids=all_prompts(), params=all_params(), sizes=all_sizes())
def test_a_complete_choice_ends_without_a_step_of_the_model(
    prompt_ids: tuple[int, ...], params: SamplingParams, sizes: Sizes
) -> None:
    """All tokens were logged, the end was not: the end is said, nothing is computed."""
    request = request_of("job", prompt_ids, params)
    if not is_possible(request, sizes):
        return
    harness = Harness(sizes)
    harness.add(cut(request, num_kept=MAX_MODEL_LEN))

    harness.run()

    assert harness.reasons == {key: reason for key, (_, reason) in oracle(request).items()}
    assert harness.model.num_steps == 0


class SupervisorAndEngine(RuleBasedStateMachine):
    """Everything a supervisor may say, in any order; tokens are held against the oracle."""

    jobs: Bundle[Request] = Bundle("jobs")

    @initialize(sizes=all_sizes(), policy=all_policies())
    def build(self, sizes: Sizes, policy: Policy) -> None:
        lanes = [dataclasses.replace(lane, ageing_tokens=50) for lane in DEFAULT_LANES]
        self.harness = Harness(sizes, policy=policy, lanes=lanes)
        self.num_jobs = 0
        self.due: dict[str, Request] = {}
        self.stopped: set[tuple[str, int]] = set()

    @rule(target=jobs, prompt_ids=all_prompts(), params=all_params())
    def add(
        self, prompt_ids: tuple[int, ...], params: SamplingParams
    ) -> Request | MultipleResults[Request]:
        self.num_jobs += 1
        request = request_of(f"job-{self.num_jobs}", prompt_ids, params)
        if not is_possible(request, self.harness.sizes):
            with pytest.raises(RequestRefused):
                self.harness.add(request)
            return multiple()
        self.harness.add(request)
        self.due[request.job_id] = request
        return request

    @rule(target=jobs, old=consumes(jobs), num_kept=st.integers(0, 25))
    def rerun(self, old: Request, num_kept: int) -> Request:
        """The job's lease lapsed and it came back here, under a newer epoch."""
        request = cut(dataclasses.replace(old, epoch=old.epoch + 1), num_kept)
        self.harness.add(request)
        self.due[request.job_id] = request
        self.stopped -= {(request.job_id, choice) for choice in range(request.params.n)}
        return request

    @rule(request=jobs)
    def add_a_fenced_epoch(self, request: Request) -> None:
        """A late command of an older attempt changes nothing while a newer one runs."""
        if request.job_id in self.due and not self.has_ended(request):
            self.harness.engine.add(dataclasses.replace(request, epoch=request.epoch - 1))
        self.harness.engine.stop_job(request.job_id, request.epoch - 1)
        self.harness.engine.stop_choice(request.job_id, request.epoch - 1, 0)

    @rule(request=consumes(jobs))
    def stop_job(self, request: Request) -> None:
        self.harness.engine.stop_job(request.job_id, request.epoch)
        self.due.pop(request.job_id, None)

    @rule(request=jobs, choice=st.integers(0, 3))
    def stop_choice(self, request: Request, choice: int) -> None:
        self.harness.engine.stop_choice(request.job_id, request.epoch, choice)
        self.stopped.add((request.job_id, choice))

    @rule(request=jobs)
    def preempt(self, request: Request) -> None:
        """As memory pressure does, at any moment."""
        self.harness.engine.preempt(request.job_id)

    @rule()
    def evict(self) -> None:
        self.harness.engine.evict_cache()

    @rule(request=jobs, lane=st.sampled_from(("interactive", "standard", "batch")))
    def reprioritise(self, request: Request, lane: str) -> None:
        self.harness.engine.reprioritise(request.job_id, request.epoch, lane)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        if hasattr(self, "harness"):
            self.harness.engine.audit()

    def has_ended(self, request: Request) -> bool:
        keys = {(request.job_id, choice) for choice in range(request.params.n)}
        return keys <= self.harness.reasons.keys() | self.stopped

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for request in self.due.values():
            for key, (token_ids, reason) in oracle(request).items():
                output_ids = self.harness.output_ids[key]
                assert output_ids == token_ids[: len(output_ids)]
                if key not in self.stopped:
                    assert output_ids == token_ids
                    assert self.harness.reasons[key] == reason


TestSupervisorAndEngine = SupervisorAndEngine.TestCase
TestSupervisorAndEngine.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, derandomize=True
)
