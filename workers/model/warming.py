"""The largest step that a worker can be asked for, run at load: its memory is measured, and its
kernels are compiled."""

import torch

from contract.jobs import SamplingParams
from workers.engine.interface import Padding
from workers.engine.sequence import Sequence
from workers.model.runner import ModelRunner
from workers.model.sampler import sample

_DRAWS = (
    SamplingParams(max_tokens=1, seed=0, temperature=1.0),
    SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9, logprobs=20),
)


@torch.inference_mode()
def warm_up(runner: ModelRunner, num_tokens: int, num_rows: int) -> None:
    """Computes `num_tokens` of padding with all their logits, as if log probabilities of a prompt
    were asked for, and samples `num_rows` of them in every way. Writes only the scratch block."""
    longest = min(num_tokens, runner.max_model_len)
    starts = range(0, num_tokens, longest)
    padding = [Padding(0, min(longest, num_tokens - start)) for start in starts]
    logits = runner.padding_logits(padding)
    sample(logits[:num_rows], [_sequence(number) for number in range(num_rows)])


def _sequence(number: int) -> Sequence:
    return Sequence(
        job_id="warm-up",
        epoch=0,
        choice=number,
        tenant="",
        lane="",
        token_ids=[0],
        num_prompt=1,
        params=_DRAWS[number % len(_DRAWS)],
    )
