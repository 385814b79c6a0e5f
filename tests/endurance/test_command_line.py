"""What all long runs share: a table that says everything, and an end at Ctrl-C."""

import signal
import subprocess
import sys

import pytest

from tests.endurance.command_line import EXIT_INTERRUPTED, as_table
from tests.infra.processes import any_alive, descendants, wait_until


def test_the_table_shows_every_figure_and_every_violation() -> None:
    """Nested figures are indented, sentences are told, rows of figures are counted."""
    figures = {
        "jobs": 7,
        "by way": {"at once": 3},
        "samples": [{"at_s": 1}, {"at_s": 2}],
        "violations": ["job 5: it ran on"],
    }

    lines = as_table(figures).splitlines()

    assert [line.split()[-1] for line in lines] == ["7", "way", "3", "2", "1", "on"]
    assert lines[-1] == "  job 5: it ran on"


@pytest.mark.e2e
def test_ctrl_c_ends_everything() -> None:
    """In the middle of a run: exit status 130, and no process is left."""
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.endurance.cancels", "--count=100000"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    with run.stderr as errors:
        lines = iter(errors.readline, "")
        assert any("of 100000 cancels" in line for line in lines)
        children = descendants(run.pid)
        assert len(children) >= 6, "Redis and its reaper, a gateway, two workers of two processes"

        run.send_signal(signal.SIGINT)

        assert "interrupted" in "".join(lines)
    assert run.wait(timeout=60) == EXIT_INTERRUPTED
    wait_until(lambda: not any_alive(children))
