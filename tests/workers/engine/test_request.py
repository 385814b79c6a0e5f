"""Requests that an engine refuses, each for one job alone, with a code and one sentence."""

import math

import msgspec
import pytest

from contract.errors import ErrorCode
from contract.jobs import FinishReason, SamplingParams
from tests.fakes import EOS_ID, VOCAB_SIZE
from tests.workers.engine.harness import MAX_MODEL_LEN, Harness, Sizes, job
from workers.engine.interface import EngineLimits
from workers.engine.sequence import RequestRefused, Sequence, ending_token_ids

REFUSED_CHANGES: list[dict[str, object]] = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"top_k": -1},
    {"repetition_penalty": 0.0},
    {"presence_penalty": math.inf},
    {"frequency_penalty": math.nan},
    {"logit_bias": {VOCAB_SIZE: 1.0}},
    {"logit_bias": {1: math.inf}},
    {"logprobs": VOCAB_SIZE + 1},
    {"max_tokens": -1},
    {"min_tokens": -1},
    {"seed": 2**63},
    {"n": 0},
]


@pytest.mark.parametrize("changes", REFUSED_CHANGES, ids=str)
def test_a_bad_parameter_is_refused_and_costs_no_other_job(changes: dict[str, object]) -> None:
    """The refused job leaves nothing behind; an earlier one runs to its end."""
    harness = Harness(Sizes())
    harness.add(job("good"))

    with pytest.raises(RequestRefused) as refusal:
        harness.add(job("bad", (1, 2, 3), **changes))  # type: ignore[arg-type]
    harness.run()

    assert refusal.value.code == ErrorCode.BAD_PARAMETER
    assert harness.reasons.keys() == {("good", 0)}


@pytest.mark.parametrize("prompt_ids", [(), (VOCAB_SIZE,), (1, -1)])
def test_a_prompt_outside_the_vocabulary_is_refused(prompt_ids: tuple[int, ...]) -> None:
    """On a device such an id would read out of bounds and fail every job."""
    with pytest.raises(RequestRefused) as refusal:
        Harness(Sizes()).add(job(prompt_ids=prompt_ids))

    assert refusal.value.code == ErrorCode.BAD_PARAMETER


def test_known_outputs_are_checked_like_the_prompt() -> None:
    """A log from another model's vocabulary, or with too few choices."""
    harness = Harness(Sizes())

    for outputs in (((VOCAB_SIZE,),), ((), ())):
        with pytest.raises(RequestRefused):
            harness.engine.add(msgspec.structs.replace(job(), outputs=outputs))


@pytest.mark.parametrize(
    ("sizes", "longest", "num_output"),
    [
        # One token of output must fit into the context.
        (Sizes(), MAX_MODEL_LEN - 1, 1),
        # Sixteen slots hold ten prompt tokens and six of seven output tokens; the last one's KV
        # is not kept.
        (Sizes(num_blocks=4, block_size=4), 10, 7),
    ],
)
def test_a_job_that_can_never_fit_is_refused(sizes: Sizes, longest: int, num_output: int) -> None:
    """With one more token of its prompt; without it the job runs."""
    harness = Harness(sizes)

    with pytest.raises(RequestRefused) as refusal:
        harness.add(job(prompt_ids=[1] * (longest + 1), max_tokens=num_output))
    harness.add(job("fits", [1] * longest, max_tokens=num_output, ignore_eos=True))
    harness.run()

    assert refusal.value.code == ErrorCode.PROMPT_TOO_LONG
    assert len(harness.output_ids["fits", 0]) == num_output


def test_a_token_that_a_model_must_not_sample_does_not_end_a_choice() -> None:
    """Before `min_tokens`."""
    for min_tokens, reason in ((1, FinishReason.STOP), (2, None)):
        params = SamplingParams(max_tokens=4, seed=0, min_tokens=min_tokens)
        sequence = Sequence("job", 1, 0, "t", "lane", [EOS_ID, 1, EOS_ID], 1, params)
        sequence.ending_ids = frozenset({EOS_ID})
        assert sequence.end_reason(max_model_len=100) == reason


def test_a_refusal_does_not_quote_the_prompt() -> None:
    """The message is logged and sent to clients."""
    with pytest.raises(RequestRefused) as refusal:
        Harness(Sizes()).add(job(prompt_ids=[123456789]))

    assert "123456789" not in refusal.value.message


def test_eos_and_stop_tokens_end_a_choice_unless_eos_is_ignored() -> None:
    """`ignore_eos` does not affect the caller's stop tokens."""
    params = SamplingParams(max_tokens=1, seed=0, stop_token_ids=(10,))
    ignoring = SamplingParams(max_tokens=1, seed=0, stop_token_ids=(10,), ignore_eos=True)

    assert ending_token_ids(params, frozenset({EOS_ID})) == {10, EOS_ID}
    assert ending_token_ids(ignoring, frozenset({EOS_ID})) == {10}


@pytest.mark.parametrize(
    "values", [(0, 1, 1, 0.8), (1, 0, 1, 0.8), (1, 1, 0, 0.8), (1, 1, 1, 0.0), (1, 1, 1, 1.1)]
)
def test_limits_under_which_nothing_runs_are_refused(values: tuple[int, int, int, float]) -> None:
    """When the engine starts, instead of waiting forever."""
    with pytest.raises(ValueError, match=r"must be|is a share"):
        EngineLimits(*values)
