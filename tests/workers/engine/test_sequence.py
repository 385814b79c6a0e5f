"""When a sequence ends, and why."""

import pytest

from contract.jobs import FinishReason, SamplingParams
from workers.engine.sequence import Sequence

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 9


@pytest.mark.parametrize(
    ("output_ids", "min_tokens", "reason"),
    [
        ((), 0, None),
        ((1, 2), 0, None),
        ((1, EOS), 0, STOP),
        ((1, EOS), 1, STOP),
        ((1, EOS), 2, None),  # a model that samples what it must not does not end the choice
        ((1, 2, 3, 4), 0, LENGTH),
        ((1, 2, 3, EOS), 0, STOP),
    ],
)
def test_the_last_known_token_tells_the_end(
    output_ids: tuple[int, ...], min_tokens: int, reason: FinishReason | None
) -> None:
    """A stop token comes before the length; before `min_tokens` there is no stop."""
    params = SamplingParams(max_tokens=4, seed=0, min_tokens=min_tokens)
    sequence = Sequence("job", 1, 0, "t", "lane", [EOS, *output_ids], 1, params)
    sequence.ending_ids = frozenset({EOS})

    assert sequence.end_reason(max_model_len=100) == reason


def test_the_context_ends_what_max_tokens_does_not() -> None:
    """Prompt and output together fill the context."""
    params = SamplingParams(max_tokens=100, seed=0)
    sequence = Sequence("job", 1, 0, "t", "lane", [1, 2, 3, 4], 2, params)

    assert sequence.end_reason(max_model_len=4) == LENGTH
    assert sequence.end_reason(max_model_len=5) is None
