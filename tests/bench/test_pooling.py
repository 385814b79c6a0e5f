"""`python -m bench.pooling`: both sides get the same texts, and their vectors agree."""

import pytest

from bench.pooling import main, make_texts


def test_both_are_measured_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each, with the least cosine of their vectors."""
    assert main(["--sizes", "minilm", "--texts", "3", "--runs", "1"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[1]: row for row in rows if row[:1] == ["minilm"]}
    assert set(found) == {"sentence-transformers", "batchway"}
    assert float(found["batchway"][-1]) >= 0.9999
    assert float(found["sentence-transformers"][-2]) == 1.0


def test_texts_vary_in_length_and_with_the_seed() -> None:
    texts = make_texts(64, seed=1)

    assert texts == make_texts(64, seed=1) != make_texts(64, seed=2)
    assert min(map(len, texts)) >= 2
    assert 128 < max(map(len, texts)) <= 254
