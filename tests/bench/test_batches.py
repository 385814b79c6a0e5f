"""Measures batches on a small model: every line is answered, every part is reported."""

import json
from pathlib import Path

import pytest

from bench.batches import main
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.campaign]

PARTS = {"engine", "worker's supervisor", "gateway"}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = save_tiny_model("llama", tmp_path_factory.mktemp("batches") / "llama")
    return [f"--model={model}", "--dtype=float32", "--prompt-tokens=4", "--output-tokens=2"]


@pytest.mark.long
def test_peaks_and_speed_of_two_sizes(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["memory", "--lines", "3", "70", f"--json={out}", *options]) == 0
    runs = json.loads(out.read_text())
    assert [(run["num_lines"], run["num_tokens"]) for run in runs] == [(3, 6), (70, 140)]
    for run in runs:
        assert set(run["peak_mib"]) >= PARTS
        assert all(mib > 1 for mib in run["peak_mib"].values())
    assert "| peak MiB | 3 lines | 70 lines |" in capsys.readouterr().out


def test_calls_are_measured_alone_and_beside_a_batch(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In turns; the first of each is left out."""
    out = tmp_path / "out.json"
    arguments = ["--lines=800", "--rounds=1", "--rate=10", "--turn-s=0.5", f"--json={out}"]
    assert main(["beside", *arguments, *options]) == 0
    turns = json.loads(out.read_text())
    assert [turn["is_beside"] for turn in turns] == [False, True]
    assert all(turn["ttft_p99_s"] >= turn["ttft_p50_s"] > 0 for turn in turns)
    assert "| p99, median of 1 turns |" in capsys.readouterr().out
