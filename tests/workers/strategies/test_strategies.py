"""A strategy changes when a sequence runs, never what it yields."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.harness import Harness, Sizes, all_sizes, job
from tests.workers.engine.test_engine_properties import Workload, add_all, assert_oracle, workloads
from workers.engine.strategy import Strategy
from workers.strategies.continuous import ContinuousBatching
from workers.strategies.dynamic import DynamicBatching
from workers.strategies.static import StaticBatching


def all_strategies() -> st.SearchStrategy[Strategy]:
    static = st.builds(
        StaticBatching,
        batch_size=st.integers(1, 8),
        max_wait_s=st.sampled_from((0.0, 0.5)),
        drain_share=st.sampled_from((0.0, 0.3, 0.9)),
        is_padded=st.booleans(),
    )
    dynamic = st.builds(
        DynamicBatching,
        batch_size=st.integers(1, 8),
        window_s=st.sampled_from((0.0, 0.02)),
        bucket_edges=st.sampled_from(((), (4,), (3, 10, 20))),
        is_padded=st.booleans(),
    )
    return st.one_of(st.just(ContinuousBatching()), static, dynamic)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(workload=workloads, sizes=all_sizes(), strategy=all_strategies())
def test_every_strategy_yields_the_same_tokens(
    workload: Workload, sizes: Sizes, strategy: Strategy
) -> None:
    """Held against the oracle, for any workload, memory and parameters."""
    harness = Harness(sizes, strategy)
    requests = add_all(harness, workload)

    harness.run()

    assert_oracle(harness, requests)


def test_a_sequence_joins_a_running_batch_in_the_next_step() -> None:
    """That is what makes it continuous."""
    harness = Harness(Sizes())
    harness.add(job("first", ignore_eos=True))
    harness.step()
    harness.add(job("second", ignore_eos=True))

    outputs = harness.step().outputs

    assert {output.sequence.job_id for output in outputs} == {"first", "second"}


@pytest.mark.parametrize("strategy", [StaticBatching(max_wait_s=0.5), DynamicBatching()])
def test_an_engine_with_nothing_to_wait_for_is_never_woken(strategy: Strategy) -> None:
    """Only an addition can give it work."""
    assert Harness(Sizes(), strategy).engine.next_wake_s() is None
