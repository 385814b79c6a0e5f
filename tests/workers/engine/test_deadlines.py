"""Tests of the queue of deadlines."""

from workers.engine.interface import Deadlines


def test_deadlines_of_ended_jobs_are_forgotten() -> None:
    """A batch's jobs have a day: 100,000 that ended long before leave little; those of jobs that
    are held come in order."""
    deadlines, held = Deadlines(), {"late": 1, "early": 1}
    deadlines.add(2.0, "late", 1, held)
    deadlines.add(1.0, "early", 1, held)
    for number in range(100_000):
        deadlines.add(86_400.0, f"job-{number}", 1, held)
    assert deadlines.take_passed(3.0) == [(1.0, "early", 1), (2.0, "late", 1)]
    assert len(deadlines.take_passed(86_400.0)) < 2_000
    assert deadlines.next_s is None
