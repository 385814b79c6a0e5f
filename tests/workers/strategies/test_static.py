"""Static batching: full batches, one after another, and what a rectangle wastes."""

import pytest

from tests.workers.engine.harness import Harness, Sizes, job, jobs_of
from workers.engine.strategy import StaticBatching


def start(strategy: StaticBatching, *max_tokens: int, sizes: Sizes | None = None) -> Harness:
    """An engine with a job for each number, which has just so many output tokens."""
    harness = Harness(sizes or Sizes(), strategy)
    for number, num in enumerate(max_tokens):
        harness.add(job(f"job-{number}", ignore_eos=True, max_tokens=num))
    return harness


PADDED = StaticBatching(batch_size=2, max_wait_s=0, drain_share=0.5, is_padded=True)


@pytest.mark.parametrize(
    ("strategy", "max_num_seqs", "max_tokens", "ran"),
    [
        # A batch runs to its end before the next begins, although there is room.
        (StaticBatching(2, max_wait_s=0), 8, (2, 4, 1), ["01", "01", "1", "1", "2"]),
        # A full one begins in the step after the last has ended, however short it has waited.
        (StaticBatching(2, max_wait_s=60), 8, (1, 1, 1, 1), ["01", "23"]),
        # With half of the batch left, a drain lets the next one in beside the short tail.
        (StaticBatching(2, max_wait_s=0, drain_share=0.5), 8, (2, 4, 1), ["01", "01", "12"]),
        # Two rows of a padded batch, one of them dead, leave no room for two more of three.
        (PADDED, 3, (1, 3, 1, 1), ["01", "1", "1", "23"]),
    ],
)
def test_batches_run_one_after_another(
    strategy: StaticBatching, max_num_seqs: int, max_tokens: tuple[int, ...], ran: list[str]
) -> None:
    """`ran` has the numbers of the jobs of each step, between which the engine does not sleep."""
    harness = start(strategy, *max_tokens, sizes=Sizes(max_num_seqs=max_num_seqs))
    for numbers in ran:
        assert harness.engine.next_wake_s() == harness.now_s
        assert jobs_of(harness.step()) == {f"job-{number}" for number in numbers}


def test_a_batch_waits_until_it_is_full() -> None:
    """The engine sleeps until the second job comes; then both run in the same step."""
    harness = start(StaticBatching(batch_size=2, max_wait_s=60), 3)
    first = harness.step()
    wake_s = harness.engine.next_wake_s()
    harness.add(job("second"))

    assert first.num_step_tokens == 0
    assert wake_s == 60
    assert jobs_of(harness.step()) == {"job-0", "second"}


def test_a_batch_that_never_fills_starts_when_its_first_has_waited_enough() -> None:
    """On an injected clock, not a moment earlier."""
    harness = start(StaticBatching(batch_size=8, max_wait_s=2.0), 3, 3)
    harness.step()

    harness.now_s = 1.999
    early = harness.step()
    harness.now_s = 2.0

    assert jobs_of(early) == set()
    assert jobs_of(harness.step()) == {"job-0", "job-1"}


def test_a_preempted_sequence_comes_back_in_its_own_batch() -> None:
    """Memory for one and a half: the second loses its blocks, and still goes before the third."""
    sizes = Sizes(num_blocks=10, block_size=1, kv_high_water=1.0)
    strategy = StaticBatching(batch_size=2, max_wait_s=0)
    harness = start(strategy, 6, 6, 6, sizes=sizes)

    harness.run()

    ended = list(harness.reasons)
    assert harness.num_preemptions > 0
    assert ended == [("job-0", 0), ("job-1", 0), ("job-2", 0)]


def test_padding_counts_the_unused_part_of_the_rectangle() -> None:
    """Prompts up to the longest, and rows up to the longest output: no token more or less."""
    num_prompts, num_outputs = (3, 9, 5), (2, 4, 7)
    harness = Harness(
        Sizes(max_num_batched_tokens=100), StaticBatching(batch_size=3, is_padded=True)
    )
    for number, (num_prompt, num_output) in enumerate(zip(num_prompts, num_outputs, strict=True)):
        prompt_ids = range(num_prompt)
        harness.add(job(f"job-{number}", prompt_ids, ignore_eos=True, max_tokens=num_output))

    num_padding = [harness.step().num_padding_tokens for _ in range(max(num_outputs))]

    prompt_waste = sum(max(num_prompts) - num for num in num_prompts)
    # One row is computed for nothing after step 2, two after step 4.
    assert num_padding == [prompt_waste, 0, 1, 1, 2, 2, 2]
    assert sum(num_padding) == prompt_waste + sum(max(num_outputs) - num for num in num_outputs)
    assert harness.model.num_padding_tokens == sum(num_padding)


def test_a_rectangle_takes_its_tokens_out_of_the_budget() -> None:
    """One of 24 tokens takes three steps of 10, and only then does it yield its first tokens."""
    harness = Harness(
        Sizes(max_num_batched_tokens=10), StaticBatching(batch_size=2, is_padded=True)
    )
    harness.add(job("long", range(12), ignore_eos=True, max_tokens=1))
    harness.add(job("short", range(2), ignore_eos=True, max_tokens=3))

    reports = [harness.step() for _ in range(4)]

    assert [report.num_padding_tokens for report in reports] == [10, 0, 0, 1]
    assert [report.num_step_tokens for report in reports] == [0, 10, 4, 1]
    assert [len(report.outputs) for report in reports] == [0, 0, 2, 1]


def test_a_flat_batch_has_no_padding() -> None:
    """The same strategy, but not padded: only the times of arrival and end differ."""
    harness = start(StaticBatching(batch_size=2), 2, 5)

    harness.run()

    assert harness.model.num_padding_tokens == 0
