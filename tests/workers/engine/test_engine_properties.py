"""Properties of every workload: equal tokens, no lost block, no exceeded limit, termination.

`test_state_machine` mixes everything a supervisor may do, with any strategy, arrivals, preemptions
and evictions; these tests check one promise each.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.jobs import SamplingParams
from tests.workers.engine.harness import (
    MAX_MODEL_LEN,
    Harness,
    Prompts,
    Sizes,
    all_params,
    all_prompts,
    all_sizes,
    assert_oracle,
    oracle,
)
from workers.engine.sequence import RequestRefused
from workers.ipc.messages import Request

Workload = list[tuple[Prompts, SamplingParams]]

workloads = st.lists(st.tuples(all_prompts(), all_params()), min_size=1, max_size=6)
quick = settings(max_examples=150, deadline=None, derandomize=True)


def request_of(job_id: str, prompts: Prompts, params: SamplingParams, epoch: int = 1) -> Request:
    num = params.n * len(prompts)
    return Request(job_id, epoch, "t", "lane", prompts, params, ((),) * num, (False,) * num)


def is_possible(request: Request, sizes: Sizes) -> bool:
    """Whether a job can run alone, computed independently of the engine."""
    longest = max(map(len, request.prompts))
    num_known = min(longest + request.params.max_tokens, MAX_MODEL_LEN)
    return longest < MAX_MODEL_LEN and num_known - 1 <= sizes.num_kv_tokens


def cut(request: Request, num_kept: int, finishes: bool = False) -> Request:
    """The job after `num_kept` tokens of each choice were logged."""
    outputs = [token_ids for token_ids, _ in oracle(request).values()]
    return msgspec.structs.replace(
        request,
        outputs=tuple(tuple(token_ids[:num_kept]) for token_ids in outputs),
        finished=tuple(finishes and len(token_ids) <= num_kept for token_ids in outputs),
    )


def add_all(harness: Harness, workload: Workload) -> list[Request]:
    """Adds the jobs that can run and returns them. Asserts that exactly the others are refused."""
    taken = []
    for number, (prompts, params) in enumerate(workload):
        request = request_of(f"job-{number}", prompts, params)
        if is_possible(request, harness.sizes):
            harness.add(request)
            taken.append(request)
        else:
            with pytest.raises(RequestRefused):
                harness.add(request)
    return taken


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
@given(
    prompts=all_prompts(),
    params=all_params(),
    num_kept=st.integers(0, 25),
    finishes=st.booleans(),
    sizes=all_sizes(),
)
def test_a_resume_from_any_cut_goes_on_with_the_same_tokens(
    prompts: Prompts,
    params: SamplingParams,
    num_kept: int,
    finishes: bool,
    sizes: Sizes,
) -> None:
    """A worker that gets the first k tokens yields exactly the rest, at the right positions."""
    request = request_of("job", prompts, params)
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
@given(prompts=all_prompts(), params=all_params(), sizes=all_sizes())
def test_a_complete_choice_ends_without_a_step_of_the_model(
    prompts: Prompts, params: SamplingParams, sizes: Sizes
) -> None:
    """All tokens were logged but not the end: the end is reported, nothing is computed."""
    request = request_of("job", prompts, params)
    if not is_possible(request, sizes):
        return
    harness = Harness(sizes)
    harness.add(cut(request, num_kept=MAX_MODEL_LEN))

    harness.run()

    assert harness.reasons == {key: reason for key, (_, reason) in oracle(request).items()}
    assert harness.model.num_steps == 0
