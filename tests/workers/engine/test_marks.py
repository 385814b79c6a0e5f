"""What a step tells of its jobs beside their output: chunks of prompts, and losses of a place."""

from tests.workers.engine.harness import Harness, Sizes, job
from workers.engine.admission_check import RecentLengths
from workers.lanes import Lane

PROMPT = tuple(range(1, 20))


def marks_of(harness: Harness) -> list[tuple[str, str, int]]:
    return [(mark.job_id, mark.kind, mark.num_tokens) for mark in harness.step().marks]


def test_each_chunk_of_a_prompt_is_told_and_no_decoded_token() -> None:
    """19 tokens in steps of 8; what was computed before is not told again."""
    harness = Harness(Sizes(max_num_batched_tokens=8))
    harness.add(job("a", PROMPT, ignore_eos=True))
    assert marks_of(harness) == [("a", "prefill", 8)]
    assert marks_of(harness) == [("a", "prefill", 8)]
    assert marks_of(harness) == [("a", "prefill", 3)]
    assert marks_of(harness) == []


def test_running_sequences_take_the_memory_by_preemption() -> None:
    """As many marks as the report counts, and what was lost is computed again."""
    harness = Harness(
        Sizes(num_blocks=15, kv_high_water=1.0), lengths=RecentLengths(num_needed=10**9)
    )
    for i in range(4):
        harness.add(job(f"job-{i}", prompt_ids=[i, 1], max_tokens=30, ignore_eos=True))
    kinds = []
    while harness.engine.has_work:
        report = harness.step()
        told = [mark.kind for mark in report.marks]
        assert told.count("preempted") == report.num_preemptions
        kinds += told
    first = kinds.index("preempted")
    assert "prefill" in kinds[first:]
    assert "displaced" not in kinds


def test_an_urgent_lane_displaces() -> None:
    """The only place goes to the lane of a smaller priority; the mark says what is lost."""
    lanes = Lane("urgent", priority=0), Lane("later", priority=1)
    harness = Harness(Sizes(max_num_seqs=1, prefix_caching=False), lanes=lanes)
    harness.add(job("later", PROMPT, lane="later", ignore_eos=True))
    harness.step()
    harness.step()
    harness.add(job("urgent", (7, 8, 9), lane="urgent", ignore_eos=True))
    assert marks_of(harness) == [("later", "displaced", 20), ("urgent", "prefill", 3)]
