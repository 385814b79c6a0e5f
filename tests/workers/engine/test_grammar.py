"""Choices constrained to a grammar: forced tokens, ends, resumes and neighbours."""

import json

import msgspec
import pytest
from llguidance import LLMatcher

from contract.errors import ErrorCode
from contract.jobs import FinishReason
from tests.fakes import EOS_ID, output_text
from tests.workers.engine.harness import GRAMMAR, Harness, Sizes, job, oracle
from workers.engine.sequence import RequestRefused

DIGITS = LLMatcher.grammar_from_regex("[0-9]+")
CONSTANT = LLMatcher.grammar_from_regex("yes, of course")


def test_an_output_matches_its_schema_and_ends_with_it() -> None:
    """For several seeds. The end needs no ending token."""
    for seed in range(10):
        harness, request = Harness(Sizes()), job(grammar=GRAMMAR, max_tokens=36, seed=seed)
        harness.add(request)

        harness.run()

        assert harness.reasons["job", 0] == FinishReason.STOP
        answer = json.loads(output_text(harness.output_ids["job", 0]))
        assert answer["n"] in range(1000)
        assert answer["c"] in {"ab", "cd"}
        assert harness.output_ids["job", 0] == oracle(request)["job", 0][0]


def test_an_open_end_is_the_ending_token() -> None:
    """Digits may follow digits, so the model chooses where they end."""
    harness = Harness(Sizes())
    harness.add(job(grammar=DIGITS, max_tokens=36, seed=5))

    harness.run()

    *digits, end = harness.output_ids["job", 0]
    assert output_text(digits).isdigit()
    assert (end, harness.reasons["job", 0]) == (EOS_ID, FinishReason.STOP)


def test_forced_tokens_need_no_forward() -> None:
    """A constant is known before the first step; a schema's names are computed in one chunk."""
    harness = Harness(Sizes())
    harness.add(job(grammar=CONSTANT, max_tokens=36))

    report = harness.step()

    assert output_text(harness.output_ids["job", 0]) == "yes, of course"
    assert harness.reasons["job", 0] == FinishReason.STOP
    assert report.num_forced_tokens == 14
    assert harness.model.num_steps == 0


def test_log_probabilities_are_those_of_a_forward() -> None:
    """Then no token is forced, and the text is still the constant."""
    harness = Harness(Sizes())
    harness.add(job(grammar=CONSTANT, max_tokens=36, logprobs=1))

    harness.run()

    assert output_text(harness.output_ids["job", 0]) == "yes, of course"
    assert harness.model.num_steps == 14


@pytest.mark.parametrize("grammar", [GRAMMAR, DIGITS, CONSTANT])
def test_a_job_resumed_anywhere_ends_the_same(grammar: str) -> None:
    """For each number of logged tokens."""
    request = job(grammar=grammar, max_tokens=36, seed=3, n=2)
    whole = oracle(request)
    for cut in range(max(len(ids) for ids, _ in whole.values())):
        harness = Harness(Sizes())
        known = tuple(tuple(ids[:cut]) for ids, _ in whole.values())
        finished = tuple(len(ids) <= cut for ids, _ in whole.values())
        harness.add(msgspec.structs.replace(request, epoch=2, outputs=known, finished=finished))

        harness.run()

        assert [harness.output_ids["job", i] for i in range(2)] == [
            ids for ids, _ in whole.values()
        ]


def test_a_grammar_that_fails_costs_only_its_own_job() -> None:
    """A grammar that does not compile, and one that the logged output does not match."""
    harness, free = Harness(Sizes()), job("free", max_tokens=6)
    harness.add(job("bad", grammar="start: /(/", max_tokens=6))
    other = msgspec.structs.replace(job("other", grammar=DIGITS), outputs=((97, 98),))
    harness.add(other)
    harness.add(free)

    failed = harness.step().failed
    harness.run()

    assert [(e.job_id, e.code) for e in failed] == [
        ("bad", ErrorCode.BAD_PARAMETER),
        ("other", ErrorCode.BAD_PARAMETER),
    ]
    assert harness.output_ids["free", 0] == oracle(free)["free", 0][0]


def test_parameters_that_contradict_a_grammar_are_refused() -> None:
    """Only the grammar decides where an output may end."""
    for request in (job(grammar=GRAMMAR, min_tokens=2), job(grammar=GRAMMAR, ignore_eos=True)):
        with pytest.raises(RequestRefused, match="cannot be combined with a grammar"):
            Harness(Sizes()).add(request)
