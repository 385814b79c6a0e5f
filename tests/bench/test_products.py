"""`bench.products` measures matrix products by type and number of rows."""

from pathlib import Path

import pytest

from bench.products import main
from tests.tiny_models import save_tiny_model


def test_the_table_has_types_in_rows_and_sizes_in_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each type with and without int8 weights."""
    folder = save_tiny_model("llama", tmp_path, head_dim=16)

    assert (
        main(["--model", str(folder), "--rows", "1", "8", "--rounds", "1", "--threads", "1"]) == 0
    )

    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["rows", "1", "8"]
    names = ["float32", "int8, float32", "bfloat16", "int8, bfloat16"]
    assert [line[0] for line in lines[2:]] == names
    assert all(float(cell) >= 0 for line in lines[2:] for cell in line[1:])


def test_a_folder_without_a_model_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 1 and one sentence."""
    assert main(["--model", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().err
