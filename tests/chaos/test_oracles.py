"""Tests of the judge of answers that differ from the expected ones: it can say no."""

from typing import Any

import pytest

from tests.chaos.oracles import DOUBT, DemoOracle, demo_judge
from tests.resume.logged_job import new_job

PROMPT = b"Count from 6 to 30."
NUM_TOKENS = 12


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0, "n": 2, **DOUBT}])
def test_only_the_tokens_of_the_model_are_right(params: dict[str, Any]) -> None:
    """Greedy and sampled. Wrong are another token, the tokens of another choice, and a truncated
    answer."""
    judge = demo_judge()
    oracle = DemoOracle([], judge)
    asked = new_job("asked", tuple(PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    output: dict[int, list[int]] = {choice: [] for choice in range(asked.params.n)}
    for choice, token_ids in output.items():
        for _ in range(NUM_TOKENS):
            token_ids.append(int(judge.scores(asked, choice, token_ids).argmax()))
    assert oracle.is_right(asked, output, is_whole=True)

    last = asked.params.n - 1
    beginning = {**output, last: output[last][:-1]}
    assert oracle.is_right(asked, beginning, is_whole=False)
    assert not oracle.is_right(asked, beginning, is_whole=True)
    for position in range(NUM_TOKENS):
        wrong = {choice: list(token_ids) for choice, token_ids in output.items()}
        wrong[last][position] = (wrong[last][position] + 1) % 256
        assert not oracle.is_right(asked, wrong, is_whole=True)
    if last:
        assert not oracle.is_right(asked, {0: output[1], 1: output[0]}, is_whole=True)
