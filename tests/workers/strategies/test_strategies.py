"""A strategy changes when a sequence runs, never what it yields."""

from dataclasses import dataclass, field

from hypothesis import given, settings

from tests.workers.engine.harness import Harness, Sizes, all_sizes, job
from tests.workers.engine.test_engine_properties import Workload, add_all, assert_oracle, workloads
from workers.engine.sequence import Sequence
from workers.engine.strategy import Admission, Strategy
from workers.strategies.continuous import ContinuousBatching


@dataclass
class BatchesOfTwo:
    """Admits two at a time, and only into an empty engine: a second user of the seam."""

    seen: list[Admission] = field(default_factory=list)

    def admits(self, candidate: Sequence, admission: Admission) -> bool:
        self.seen.append(admission)
        return admission.num_running == admission.num_admitted < 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(workload=workloads, sizes=all_sizes())
def test_every_strategy_yields_the_same_tokens(workload: Workload, sizes: Sizes) -> None:
    """Held against the oracle, for any workload and memory."""
    strategies: list[Strategy] = [ContinuousBatching(), BatchesOfTwo()]
    for strategy in strategies:
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


def test_a_strategy_may_keep_sequences_out_until_a_batch_has_ended() -> None:
    """The third job waits for the two before it, although there is room."""
    harness = Harness(Sizes(), BatchesOfTwo())
    for name in ("a", "b", "c"):
        harness.add(job(name, ignore_eos=True, max_tokens=4))

    reports = [harness.step() for _ in range(4)]

    assert [report.num_waiting for report in reports] == [1, 1, 1, 1]
    assert {output.sequence.job_id for output in harness.step().outputs} == {"c"}


def test_a_strategy_is_told_what_the_step_has_left() -> None:
    """Counts of the running, the admitted and the waiting, and tokens of the budget."""
    strategy = BatchesOfTwo()
    harness = Harness(Sizes(max_num_batched_tokens=10), strategy)
    harness.now_s = 5.0
    harness.add(job("a", prompt_ids=[1, 2, 3, 4]))
    harness.add(job("b"))

    harness.step()

    assert strategy.seen == [Admission(5.0, 0, 0, 2, 10), Admission(5.0, 1, 1, 1, 6)]
