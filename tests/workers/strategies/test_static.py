"""Static batching: full batches, one after another, and what a rectangle wastes."""

from tests.workers.engine.harness import Harness, Sizes, job
from workers.engine.step_plan import StepReport
from workers.engine.strategy import StaticBatching


def start(strategy: StaticBatching, *max_tokens: int, sizes: Sizes | None = None) -> Harness:
    """An engine with a job for each number, which has just so many output tokens."""
    harness = Harness(sizes or Sizes(), strategy)
    for number, num in enumerate(max_tokens):
        harness.add(job(f"job-{number}", ignore_eos=True, max_tokens=num))
    return harness


def jobs_of(report: StepReport) -> set[str]:
    return {output.job_id for output in report.outputs}


def test_a_batch_runs_to_its_end_before_the_next_begins() -> None:
    """The third job waits until both before it have ended, although there is room."""
    harness = start(StaticBatching(batch_size=2, max_wait_s=0), 2, 4, 1)

    ran = [jobs_of(harness.step()) for _ in range(5)]

    assert ran == [{"job-0", "job-1"}] * 2 + [{"job-1"}] * 2 + [{"job-2"}]


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


def test_a_full_batch_starts_in_the_step_after_the_last_has_ended() -> None:
    """It has not waited long, but it is full: the engine does not sleep."""
    harness = start(StaticBatching(batch_size=2, max_wait_s=60), 1, 1, 1, 1)
    harness.step()

    assert harness.engine.next_wake_s() == harness.now_s
    assert jobs_of(harness.step()) == {"job-2", "job-3"}


def test_a_drain_lets_the_next_batch_in_beside_the_short_tail() -> None:
    """With half of the batch left the next one starts; without a drain it would wait on."""
    harness = start(StaticBatching(batch_size=2, max_wait_s=0, drain_share=0.5), 2, 4, 1)

    ran = [jobs_of(harness.step()) for _ in range(3)]

    assert ran == [{"job-0", "job-1"}] * 2 + [{"job-1", "job-2"}]


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


def test_rows_of_padded_batches_stay_within_the_number_of_sequences() -> None:
    """Two rows of the first batch, one of them dead, leave no room for two more of three."""
    sizes = Sizes(max_num_seqs=3)
    strategy = StaticBatching(batch_size=2, max_wait_s=0, drain_share=0.5, is_padded=True)
    harness = start(strategy, 1, 3, 1, 1, sizes=sizes)

    ran = [jobs_of(harness.step()) for _ in range(4)]

    assert ran == [{"job-0", "job-1"}, {"job-1"}, {"job-1"}, {"job-2", "job-3"}]
