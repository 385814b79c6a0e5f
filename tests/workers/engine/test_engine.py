"""The engine's handling of jobs, choices and epochs."""

import msgspec
import pytest

from contract.jobs import FinishReason
from tests.fakes import EOS_ID, HashModelOptions
from tests.workers.engine.harness import MAX_MODEL_LEN, Harness, Sizes, job, oracle
from workers.engine.admission_check import RecentLengths

BAD_ROW = HashModelOptions(bad_row_id=33)
LOST_DEVICE = HashModelOptions(crash_id=33)


def test_choices_of_a_job_are_sequences_of_their_own() -> None:
    """Three sampled choices differ, and each matches its oracle."""
    harness, request = Harness(Sizes()), job(n=3, min_tokens=5)
    harness.add(request)

    harness.run()

    assert harness.output_ids == {key: ids for key, (ids, _) in oracle(request).items()}
    assert len({tuple(ids) for ids in harness.output_ids.values()}) == 3


def test_the_ending_token_is_reported_with_its_reason() -> None:
    """The supervisor decides about an eos token's text; the engine reports the token."""
    harness, request = Harness(Sizes()), job(prompt_ids=[5, 6], max_tokens=200, seed=3)
    (token_ids, reason) = oracle(request)["job", 0]
    assert (token_ids[-1], reason) == (EOS_ID, FinishReason.STOP)
    harness.add(request)

    harness.run()

    assert harness.output_ids["job", 0][-1] == EOS_ID
    assert harness.reasons["job", 0] == FinishReason.STOP


def test_eos_ignored_goes_on_to_the_context_length() -> None:
    """Prompt and output fill the context; then the reason is length."""
    harness = Harness(Sizes())
    harness.add(job(max_tokens=1000, ignore_eos=True))

    harness.run()

    assert len(harness.output_ids["job", 0]) == MAX_MODEL_LEN - 3
    assert harness.reasons["job", 0] == FinishReason.LENGTH


def test_a_newer_epoch_replaces_the_older_one() -> None:
    """The older attempt reports nothing more."""
    harness, request = Harness(Sizes()), job(max_tokens=20, ignore_eos=True)
    harness.add(request)
    harness.step()

    harness.add(msgspec.structs.replace(request, epoch=2))
    epochs = {output.epoch for output in harness.step().outputs}
    harness.run()

    assert epochs == {2}
    assert harness.output_ids["job", 0] == oracle(request)["job", 0][0]


def test_a_newer_epoch_silences_an_end_that_was_not_yet_said() -> None:
    """A complete choice of the older attempt is not reported under the old epoch."""
    harness, request = Harness(Sizes()), job(max_tokens=2, ignore_eos=True)
    harness.add(msgspec.structs.replace(request, outputs=((1, 2),)))

    harness.add(msgspec.structs.replace(request, epoch=2))

    assert harness.step().ended == []


def test_an_older_epoch_changes_nothing() -> None:
    """Neither its start nor its stop reaches the newer attempt."""
    harness, request = Harness(Sizes()), job(max_tokens=20, ignore_eos=True)
    newer = msgspec.structs.replace(request, epoch=5)
    harness.add(newer)
    harness.step()

    harness.engine.add(request)
    harness.engine.add(newer)
    harness.engine.stop_job("job", 4)
    harness.engine.stop_choice("job", 4, 0)
    harness.run()

    assert harness.output_ids["job", 0] == oracle(request)["job", 0][0]


def test_a_stopped_job_gives_its_blocks_back_at_once() -> None:
    """No step is needed. Unknown and ended jobs are ignored."""
    harness = Harness(Sizes())
    harness.add(job(n=2, ignore_eos=True))
    harness.step()

    harness.engine.stop_job("job", 1)
    harness.engine.stop_job("job", 1)
    harness.engine.stop_choice("job", 1, 0)

    assert not harness.engine.has_work
    assert harness.step().num_free_blocks == 64


def test_a_stopped_job_is_silent_about_choices_that_had_just_ended() -> None:
    """The end of a complete choice that was not reported yet is never reported."""
    harness = Harness(Sizes())
    harness.add(msgspec.structs.replace(job(max_tokens=2, ignore_eos=True), outputs=((1, 2),)))
    assert harness.engine.has_work

    harness.engine.stop_job("job", 1)

    assert not harness.engine.has_work


def test_finished_choices_are_not_run_again() -> None:
    """Of two choices, one has ended before: only the other is computed."""
    harness, request = Harness(Sizes()), job(n=2, ignore_eos=True)
    first_ids = oracle(request)["job", 0][0]
    harness.add(
        msgspec.structs.replace(request, outputs=(tuple(first_ids), ()), finished=(True, False))
    )

    harness.run()

    assert harness.reasons == {("job", 1): FinishReason.LENGTH}


def test_a_failed_row_takes_its_whole_job_and_no_other() -> None:
    """Both choices of the bad job are dropped with one error; the good job ends."""
    harness = Harness(Sizes(), model_options=BAD_ROW)
    harness.add(job("bad", prompt_ids=[33], n=2))
    harness.add(job("good"))

    report = harness.step()
    harness.run()

    assert [(error.job_id, error.epoch, error.code) for error in report.failed] == [
        ("bad", 1, "engine_error")
    ]
    assert report.num_running == 1
    assert harness.output_ids["bad", 0] == harness.output_ids["bad", 1] == []
    assert harness.output_ids["good", 0] == oracle(job("good"))["good", 0][0]


def test_an_exception_of_the_model_passes_through() -> None:
    """The device's state is unknown after it, so the process must end."""
    harness = Harness(Sizes(), model_options=LOST_DEVICE)
    harness.add(job(prompt_ids=[33]))

    with pytest.raises(RuntimeError):
        harness.step()


def test_an_idle_engine_reports_an_empty_step() -> None:
    """The model does not run; all blocks are free."""
    harness = Harness(Sizes())

    report = harness.step()

    assert not harness.engine.has_work
    assert (report.outputs, report.num_step_tokens, report.num_free_blocks) == ([], 0, 64)
    assert harness.model.num_steps == 0


def test_little_memory_preempts_and_keeps_every_token() -> None:
    """Four long sequences with memory for two: preempted and resumed, with the oracle's tokens."""
    harness = Harness(
        Sizes(num_blocks=15, kv_high_water=1.0), lengths=RecentLengths(num_needed=10**9)
    )
    requests = [
        job(f"job-{i}", prompt_ids=[i, 1], max_tokens=30, ignore_eos=True) for i in range(4)
    ]
    for request in requests:
        harness.add(request)

    harness.run()

    assert harness.num_preemptions > 0
    for request in requests:
        for key, (token_ids, _) in oracle(request).items():
            assert harness.output_ids[key] == token_ids
