"""`bench.grammar` measures the cost of masks and of compilations."""

import json
from pathlib import Path

import pytest

from bench import grammar


def test_the_command_measures_masks_and_both_kinds_of_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small model, a small vocabulary and short outputs. Every figure is positive."""
    monkeypatch.setattr(grammar, "VOCAB_SIZE", 1000)
    monkeypatch.setattr(grammar, "NUM_TOKENS", 8)
    monkeypatch.setattr(grammar, "NUM_CHOICES", 3)
    monkeypatch.setattr(grammar, "NUM_PATTERNS", 3)
    out = tmp_path / "figures.json"

    status = grammar.main([f"--folder={tmp_path}", "--size=S", "--rounds=1", f"--json={out}"])

    assert status == 0
    figures = json.loads(out.read_text())
    assert set(figures) == {
        "mask_p50_ms",
        "mask_p99_ms",
        "free_tokens_per_s",
        "constrained_tokens_per_s",
        "ratio",
        "gap_alone_p50_ms",
        "gap_alone_p99_ms",
        "gap_alone_max_ms",
        "gap_beside_p50_ms",
        "gap_beside_p99_ms",
        "gap_beside_max_ms",
    }
    assert all(value > 0 for value in figures.values())
