"""The comparison of rounded weights with the original ones."""

from pathlib import Path

import pytest
import torch

from bench.quantization import differences, main
from tests.tiny_models import save_tiny_model


def test_rounded_weights_are_compared_with_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference agrees with itself in all tokens. Rounded weights take a quarter of the
    bytes."""
    folder = save_tiny_model("llama", tmp_path)

    assert main(["--model", str(folder), "--texts", "3", "--threads", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split("  ") for line in lines[1:]}
    found = {name: [cell.strip() for cell in row if cell] for name, row in rows.items()}
    assert list(found) == ["float32", "float32, int8", "bfloat16", "bfloat16, int8"]
    _, num_bytes, *rest = found["float32"]
    assert rest == ["0.000%", "0.000000", "100.000%", "3 of 3"]
    assert float(found["float32, int8"][1]) == pytest.approx(float(num_bytes) / 4, abs=0.1)
    assert 0.0 < float(found["float32, int8"][2].rstrip("%")) < 20.0
    assert float(found["float32, int8"][3]) > 0.0


def test_another_likeliest_token_is_a_difference() -> None:
    """A constant added to all logits is none."""
    reference = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 1.0]])

    alike = differences([reference + 8.0], [reference])
    unlike = differences([reference.flip(1)], [reference])

    assert [alike[0], *alike[2:]] == ["0.000%", "100.000%", "1 of 1"]
    assert float(alike[1]) == pytest.approx(0.0, abs=1e-6)
    assert unlike[2:] == ["50.000%", "0 of 1"]
    assert float(unlike[1]) > 0.5
