"""What the products of a model cost: each type and number of rows is measured."""

from pathlib import Path

import pytest

from bench.products import main
from tests.tiny_models import save_tiny_model


def test_a_row_for_each_type_and_a_column_for_each_number_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounded weights beside those that are not."""
    folder = save_tiny_model("llama", tmp_path, head_dim=16)

    assert (
        main(["--model", str(folder), "--rows", "1", "8", "--rounds", "1", "--threads", "1"]) == 0
    )

    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["rows", "1", "8"]
    names = ["float32", "int8, float32", "bfloat16", "int8, bfloat16"]
    assert [line[0] for line in lines[2:]] == names
    assert all(float(cell) >= 0 for line in lines[2:] for cell in line[1:])


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 1 and a sentence."""
    assert main(["--model", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().err
