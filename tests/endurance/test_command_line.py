"""The command line of the long runs: a complete table, and an end at Ctrl-C."""

import pytest

from tests.campaigns.command_line import as_table
from tests.infra.processes import check_ctrl_c


def test_the_table_shows_every_figure_and_every_violation() -> None:
    """Nested figures are indented, sentences are printed, lists of figures are counted."""
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
    """Redis and its reaper, a gateway, and two workers of two processes each."""
    check_ctrl_c("tests.endurance.cancels", "--count=100000", "of 100000 cancels", 6)
