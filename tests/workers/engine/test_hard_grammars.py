"""Grammars that are hard to follow take no step from another request."""

import random
from typing import Any

import pytest

from contract.errors import ErrorCode
from gateway.grammars.compiled import GrammarRefused, Kind, compile_grammar
from tests.fakes import EOS_ID, INLINE, VOCAB_SIZE, hash_tokenizer
from tests.workers.engine.harness import Harness, Sizes, job, oracle
from workers.engine.grammar import Grammars

SIZES = Sizes(num_blocks=256, max_num_batched_tokens=128)
HARD: dict[str, tuple[Kind, Any]] = {
    "deep recursion": (Kind.GRAMMAR, 'start: "(" start ")" | "x"'),
    "ambiguous recursion": (Kind.GRAMMAR, 'start: start start | "a" | "aa"'),
    "recursive schema": (Kind.JSON_SCHEMA, {"type": "array", "items": {"$ref": "#"}}),
    "a hundred thousand repetitions": (Kind.REGEX, "x{1,100000}"),
    "repetitions of repetitions": (Kind.REGEX, "(x{1,1000}y{1,1000}){1,100}"),
    "endless white space": (Kind.REGEX, r"\s*x"),
    "many states": (Kind.REGEX, "(.*a.{18})|(.*b.{18})"),
    "ten thousand alternatives": (Kind.CHOICE, [f"v{i}" for i in range(10_000)]),
}
FREE = job("free", max_tokens=30, ignore_eos=True)


def steps_of_free(harness: Harness) -> list[int]:
    """The steps in which the free request got a token."""
    steps = []
    for number in range(100):
        report = harness.step()
        if any(output.job_id == "free" for output in report.outputs):
            steps.append(number)
    return steps


@pytest.mark.parametrize(("kind", "value"), HARD.values(), ids=HARD.keys())
def test_a_hard_grammar_takes_no_step_from_another_request(kind: Kind, value: Any) -> None:
    """Beside seven jobs of it, the request gets its tokens in the same steps as alone."""
    grammar = compile_grammar(kind, value)
    alone, beside = Harness(SIZES), Harness(SIZES)
    for number in range(7):
        beside.add(job(f"hard-{number}", grammar=grammar, max_tokens=30, seed=number))
    alone.add(FREE)
    beside.add(FREE)

    steps = steps_of_free(beside)

    assert steps == steps_of_free(alone)
    assert beside.output_ids["free", 0] == oracle(FREE)["free", 0][0]


@pytest.mark.parametrize(
    "bounds",
    [
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "string", "minLength": 5, "maxLength": 1},
        {"type": "array", "minItems": 5, "maxItems": 1},
    ],
)
def test_bounds_that_contradict_each_other_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused, match="Unsatisfiable"):
        compile_grammar(Kind.JSON_SCHEMA, bounds)


def test_a_grammar_that_reaches_a_limit_is_its_callers_fault() -> None:
    """The gateway refuses those that it finds."""
    many = " | ".join(f'"v{number}"' for number in range(3_000))
    harness = Harness(SIZES)
    harness.add(job("hard", grammar=f"start: {many}", n=2))

    failed = next(each for _ in range(9) for each in harness.step().failed)

    assert (failed.job_id, failed.code) == ("hard", ErrorCode.BAD_PARAMETER)
    assert "too complex" in failed.message
    assert not harness.engine.has_work


def test_a_long_text_reaches_no_limit() -> None:
    """Its length is counted, character by character."""
    grammar = compile_grammar(Kind.JSON_SCHEMA, {"type": "string", "maxLength": 10_000})
    matcher = Grammars(hash_tokenizer().tokenizer_json, VOCAB_SIZE, {EOS_ID}).matcher(grammar)

    for byte in b'"' + b"long text " * 999 + b'"':
        assert matcher.state.compute_bitmask()
        matcher.consume(byte)

    assert matcher.is_complete


@pytest.mark.campaign
def test_a_grammar_that_many_have_used_fails_no_later_job() -> None:
    """Copies share a lexer, whose states are limited: a job after 21,000 masks had none left."""
    grammar = compile_grammar(*HARD["many states"])
    grammars = Grammars(hash_tokenizer().tokenizer_json, VOCAB_SIZE, {EOS_ID}, *INLINE)
    draw = random.Random(0)

    for _ in range(15):
        matcher = grammars.matcher(grammar)
        for _ in range(2_000):
            grammars.start_masks({matcher: ()})
            matcher.consume(draw.choice(b"abc"))  # raises where it fails
