"""The comparison of rounded weights with the original ones."""

from pathlib import Path

import pytest
import torch

from bench.quantization import Tally, exercises, main
from tests.tiny_models import save_tiny_model
from training.draws import FAMILIES


def test_rounded_weights_are_compared_with_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference agrees with itself in all tokens. Rounded weights take a quarter of the
    bytes."""
    folder = save_tiny_model("llama", tmp_path)

    assert main(["--model", str(folder), "--texts", "3", "--threads", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "192 tokens in 3 texts"
    rows = {line.split("  ")[0]: line.split("  ") for line in lines[3:]}
    found = {name: [cell.strip() for cell in row if cell] for name, row in rows.items()}
    assert list(found) == ["float32", "float32, int8", "bfloat16", "bfloat16, int8"]
    _, num_bytes, *rest = found["float32"]
    assert rest[:2] == ["0.000%", "0.000000"]
    assert rest[3:] == ["100.000%", "3 of 3", "3 of 3"]
    assert float(found["float32, int8"][1]) == pytest.approx(float(num_bytes) / 4, abs=0.1)
    assert 0.0 < float(found["float32, int8"][2].rstrip("%")) < 20.0
    assert float(found["float32, int8"][3]) > 0.0


def test_a_tally_counts_differences() -> None:
    """A constant added to all logits is no difference; another most likely token is one."""
    reference = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 1.0]])
    alike, unlike = Tally(), Tally()

    alike.add(reference + 7.0, reference, torch.tensor([0, 2]))
    unlike.add(reference.flip(1), reference, torch.tensor([0, 1]))

    assert (alike.num_same_tokens, alike.num_same_texts, alike.num_right_texts) == (2, 1, 0)
    assert alike.difference == pytest.approx(0.0, abs=1e-9)
    assert alike.divergence == pytest.approx(0.0, abs=1e-6)
    assert (unlike.num_same_tokens, unlike.num_same_texts, unlike.num_right_texts) == (1, 0, 0)
    assert unlike.difference > 1.0
    assert unlike.divergence > 1.0
    assert unlike.loss > alike.loss


def test_only_the_answers_of_exercises_are_scored() -> None:
    """Every family has the same number of exercises. The question's tokens are not scored."""
    texts = exercises(2)

    assert len(texts) == 2 * len(FAMILIES)
    assert all(0 < text.num_given < len(text.token_ids) for text in texts)
