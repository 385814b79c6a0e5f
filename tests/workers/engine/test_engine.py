"""The engine's handling of jobs, choices and epochs."""

import msgspec

from tests.fakes import HashModelOptions
from tests.workers.engine.harness import Harness, Sizes, job, oracle

BAD_ROW = HashModelOptions(bad_row_id=33)


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


def test_an_idle_engine_reports_an_empty_step() -> None:
    """The model does not run; all blocks are free."""
    harness = Harness(Sizes())

    report = harness.step()

    assert not harness.engine.has_work
    assert (report.outputs, report.num_step_tokens, report.num_free_blocks) == ([], 0, 64)
    assert harness.model.num_steps == 0
