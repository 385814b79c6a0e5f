"""Tests of the judge of a batch's results: it can say no."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.batches import BatchOracle
from tests.chaos.fleet import HASH_MODEL
from tests.chaos.ledger import Kind, Ledger
from tests.chaos.oracles import HashOracle

NUM_LINES = 5

Results = list[dict[str, Any]]


def right_results(oracle: BatchOracle) -> Results:
    """Those of an undisturbed run; line 1 cannot run."""
    results: Results = []
    for number in range(NUM_LINES):
        ask = oracle.asks.get(f"line-{number}")
        body: dict[str, Any] = {"error": {"code": "bad"}}
        if ask is not None:
            tokens = enumerate(ask.expected)
            body = {"choices": [{"index": i, "token_ids": list(ids)} for i, ids in tokens]}
        response = {"status_code": 200 if ask else 400, "body": {"id": "any", **body}}
        results.append({"custom_id": f"line-{number}", "error": None, "response": response})
    return results


def lose(results: Results) -> None:
    del results[3]


def repeat(results: Results) -> None:
    results.append(results[1])


def invent(results: Results) -> None:
    results.append({**results[0], "custom_id": "line-5"})


def change_a_token(results: Results) -> None:
    results[2]["response"]["body"]["choices"][0]["token_ids"][0] += 1


def change_an_error(results: Results) -> None:
    results[1]["response"]["status_code"] = 500


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lose, Kind.LOST),
        (repeat, Kind.DUPLICATED),
        (invent, Kind.WRONG),
        (change_a_token, Kind.WRONG),
        (change_an_error, Kind.WRONG),
    ],
)
def test_only_the_results_of_the_undisturbed_run_are_right(
    spoil: Callable[[Results], None], kind: Kind
) -> None:
    """Each line once, with the same response."""
    ledger = Ledger()
    oracle = BatchOracle(HashOracle(HASH_MODEL), random.Random(1), NUM_LINES)
    story = ledger.open("a batch", ())
    oracle.expect(story, right_results(oracle))
    oracle.check(story, right_results(oracle))
    assert ledger.violations == []
    spoiled = right_results(oracle)
    spoil(spoiled)
    oracle.check(story, spoiled)
    assert [violation.kind for violation in ledger.violations] == [kind]


def test_wrong_tokens_are_found_before_any_fault() -> None:
    """The undisturbed run itself must be the model's."""
    ledger = Ledger()
    oracle = BatchOracle(HashOracle(HASH_MODEL), random.Random(1), NUM_LINES)
    results = right_results(oracle)
    change_a_token(results)
    oracle.expect(ledger.open("a batch", ()), results)
    assert [violation.kind for violation in ledger.violations] == [Kind.WRONG]
