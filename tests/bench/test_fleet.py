"""`python -m bench.fleet` from end to end."""

from pathlib import Path

import pytest

from bench.fleet import main

pytestmark = [pytest.mark.e2e, pytest.mark.campaign]


def test_models_are_timed_alone_and_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--folder={tmp_path}", "--models=2", "--requests=3", "--runs=1"]) == 0
    head, _, run, median = capsys.readouterr().out.splitlines()
    assert head == "| run | m0 alone, s | m1 alone, s | sum, s | together, s | ratio |"
    assert run.startswith("| 1 | ")
    assert float(median.split("|")[-2]) > 0
