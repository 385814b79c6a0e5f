"""A strategy changes when a sequence runs, never what it yields."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.harness import Harness, Sizes, all_sizes, assert_oracle, job, jobs_of
from tests.workers.engine.test_engine_properties import Workload, add_all, workloads
from workers.engine.strategy import (
    ContinuousBatching,
    DynamicBatching,
    StaticBatching,
    Strategies,
    Strategy,
)

CONTINUOUS = Strategies(ContinuousBatching())


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


def test_a_sequence_joins_a_running_batch_in_the_next_step() -> None:
    """That is what makes it continuous."""
    harness = Harness(Sizes())
    harness.add(job("first", ignore_eos=True))
    harness.step()
    harness.add(job("second", ignore_eos=True))

    assert jobs_of(harness.step()) == {"first", "second"}


@pytest.mark.parametrize("strategy", [StaticBatching(max_wait_s=0.5), DynamicBatching()])
def test_an_engine_with_nothing_to_wait_for_is_never_woken(strategy: Strategy) -> None:
    """Only an addition can give it work."""
    assert Harness(Sizes(), strategy).engine.next_wake_s() is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    workload=workloads,
    sizes=all_sizes(),
    before=all_strategies(),
    after=all_strategies(),
    num_steps=st.integers(0, 12),
)
def test_a_strategy_may_change_while_sequences_run(
    workload: Workload, sizes: Sizes, before: Strategy, after: Strategy, num_steps: int
) -> None:
    """Whoever runs, waits or was half let in: all end, with the oracle's tokens."""
    harness = Harness(sizes, before)
    requests = add_all(harness, workload)
    for _ in range(num_steps):
        harness.step()

    harness.engine.reconfigure(harness.engine.limits, Strategies(after))
    harness.run()

    assert_oracle(harness, requests)


def test_a_smaller_limit_ends_no_one_and_lets_fewer_in() -> None:
    """Four run on under a limit of two; the fifth waits until only one of them is left."""
    harness = Harness(Sizes())
    for number in range(5):
        harness.add(job(f"job-{number}", ignore_eos=True, max_tokens=number + 2))
    limits = harness.engine.limits
    harness.engine.reconfigure(dataclasses.replace(limits, max_num_seqs=4), CONTINUOUS)
    harness.step()

    harness.engine.reconfigure(dataclasses.replace(limits, max_num_seqs=2), CONTINUOUS)
    num_running = [harness.step().num_running for _ in range(4)]
    harness.run()

    assert num_running == [3, 2, 1, 1]
    assert len(harness.reasons) == 5


def test_a_lane_may_have_a_strategy_of_its_own() -> None:
    """The batch lane waits for two; an interactive job behind it goes first, at once."""
    strategies = Strategies(ContinuousBatching(), {"batch": StaticBatching(2, max_wait_s=60)})
    harness = Harness(Sizes())
    harness.engine.reconfigure(harness.engine.limits, strategies)
    harness.add(msgspec.structs.replace(job("waits", ignore_eos=True), lane="batch"))
    harness.add(msgspec.structs.replace(job("goes", ignore_eos=True), lane="interactive"))

    first = harness.step()
    harness.add(msgspec.structs.replace(job("fills", ignore_eos=True), lane="batch"))
    second = harness.step()

    assert jobs_of(first) == {"goes"}
    assert jobs_of(second) == {"goes", "waits", "fills"}
