"""Dynamic batching: the window, the number, and what buckets save."""

from tests.workers.engine.harness import Harness, Sizes, job
from workers.engine.step_plan import StepReport
from workers.engine.strategy import DynamicBatching


def jobs_of(report: StepReport) -> set[str]:
    return {output.job_id for output in report.outputs}


def test_a_window_starts_with_the_first_request_and_takes_all_until_its_end() -> None:
    """20 ms from the first, not from the last; who comes after waits for a window of its own."""
    harness = Harness(Sizes(), DynamicBatching(batch_size=8, window_s=0.02))
    harness.add(job("first", ignore_eos=True))
    harness.step()
    harness.now_s = 0.015
    harness.add(job("second", ignore_eos=True))
    early = harness.step()

    wake_s = harness.engine.next_wake_s()
    harness.now_s = 0.02
    together = harness.step()
    harness.add(job("third", ignore_eos=True))

    assert jobs_of(early) == set()
    assert wake_s == 0.02
    assert jobs_of(together) == {"first", "second"}
    assert jobs_of(harness.step()) == {"first", "second"}
    harness.now_s = 0.04
    assert jobs_of(harness.step()) == {"first", "second", "third"}


def test_a_full_batch_does_not_wait_for_the_window() -> None:
    """Whichever comes first."""
    harness = Harness(Sizes(), DynamicBatching(batch_size=2, window_s=60))
    for name in ("a", "b", "c"):
        harness.add(job(name))

    assert jobs_of(harness.step()) == {"a", "b"}


def test_a_bucket_holds_like_lengths_and_keeps_no_other_waiting() -> None:
    """Two long prompts fill their bucket at once; the short one before them waits for its own."""
    strategy = DynamicBatching(batch_size=2, window_s=60, bucket_edges=(4,))
    harness = Harness(Sizes(prefix_caching=False), strategy)
    harness.add(job("short", range(3)))
    harness.add(job("long-1", range(10)))
    harness.add(job("long-2", range(12)))

    assert jobs_of(harness.step()) == {"long-1", "long-2"}


def num_padding_tokens(bucket_edges: tuple[int, ...]) -> int:
    """Of 32 prompts of 2 to 33 tokens in an order like that of arrival, one token each."""
    strategy = DynamicBatching(batch_size=4, bucket_edges=bucket_edges, is_padded=True)
    sizes = Sizes(num_blocks=400, max_num_batched_tokens=2000, prefix_caching=False)
    harness = Harness(sizes, strategy)
    for number in range(32):
        num_prompt = 2 + number * 13 % 32
        harness.add(job(f"job-{number}", range(num_prompt), ignore_eos=True, max_tokens=1))
    harness.run()
    return harness.model.num_padding_tokens


def test_buckets_reduce_padding() -> None:
    """560 prompt tokens: of what is computed, 40% is padding without buckets, 13% with four."""
    num_prompt_tokens = sum(range(2, 34))
    without, with_four = num_padding_tokens(()), num_padding_tokens((9, 17, 25))

    assert num_prompt_tokens == 560
    assert round(without / (num_prompt_tokens + without), 2) == 0.40
    assert round(with_four / (num_prompt_tokens + with_four), 2) == 0.13
