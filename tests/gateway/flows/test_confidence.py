"""How sure a member is, and how answers are combined."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.flows import Confidence
from gateway.runners.flows.kinds import best, confidence, mean, vote

LOGPROBS = st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=20)


def test_mean_is_the_geometric_mean_of_probabilities() -> None:
    """Of 0.5 and 0.125 it is 0.25."""
    kind = Confidence(by="mean_logprob")
    assert confidence(kind, [math.log(0.5), math.log(0.125)], "") == pytest.approx(0.25)


@pytest.mark.parametrize(("quantile", "probability"), [(0.0, 0.1), (0.1, 0.1), (0.5, 0.3), (1, 1)])
def test_a_quantile_is_the_probability_of_a_token(quantile: float, probability: float) -> None:
    """Of the lower neighbour where it is between two tokens."""
    logprobs = [math.log(p) for p in (0.9, 0.1, 0.3, 1.0)]
    kind = Confidence(by="quantile_logprob", quantile=quantile)
    assert confidence(kind, logprobs, "") == pytest.approx(probability)


@given(LOGPROBS, st.sampled_from(["mean_logprob", "quantile_logprob"]), st.floats(0, 1))
def test_confidence_is_a_share(logprobs: list[float], by: str, quantile: float) -> None:
    """Also of infinitely unlikely tokens and of no tokens, which are worth nothing."""
    kind = Confidence(by=by, quantile=quantile)  # type: ignore[arg-type]
    found = confidence(kind, logprobs, "")
    assert 0.0 <= found <= 1.0
    assert logprobs or found == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"answer": 3, "sure": 0.75}', 0.75),
        ('{"sure": 1}', 1.0),
        ('{"sure": true}', 0.0),
        ('{"sure": 1.5}', 0.0),
        ('{"sure": "0.9"}', 0.0),
        ('{"other": 0.9}', 0.0),
        ("[0.9]", 0.0),
        ("I am sure", 0.0),
        ("", 0.0),
    ],
)
def test_a_field_counts_where_it_is_a_share(text: str, expected: float) -> None:
    """Any other answer is not sure."""
    assert confidence(Confidence(by="field", field="sure"), [], text) == expected


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["a", "b", "b"], 1),
        (["a", "b"], 0),
        (["c", "b", "a", "a", "b"], 1),
        (["x y", "z", " x\ny "], 0),
    ],
)
def test_the_most_frequent_answer_wins(answers: list[str], winner: int) -> None:
    """Of equals the earliest; white space does not tell answers apart."""
    assert vote(answers) == winner


@pytest.mark.parametrize(
    ("scores", "winner"), [([0.1, 0.9, 0.9], 1), ([math.nan, -5.0], 1), ([-1.0], 0)]
)
def test_the_highest_score_wins(scores: list[float], winner: int) -> None:
    """Of equals the earliest; what is no number loses."""
    assert best(scores) == winner


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1))
def test_the_mean_is_taken_element_by_element(rows: list[list[float]]) -> None:
    """In the format of the members' vectors, within float32's rounding."""
    found = struct.unpack("<3f", mean([struct.pack("<3f", *row) for row in rows]))
    for value, column in zip(found, zip(*rows, strict=True), strict=True):
        assert value == pytest.approx(math.fsum(column) / len(rows), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("vectors", [[], [b"1234", b"12345678"], [b"123", b"456"]])
def test_vectors_that_differ_have_no_mean(vectors: list[bytes]) -> None:
    """Nor have none, nor bytes that are no vectors."""
    with pytest.raises(ValueError, match=r"differ|bytes length"):
        mean(vectors)
