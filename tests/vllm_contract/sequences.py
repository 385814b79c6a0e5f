"""Choices whose logits depend on their tokens, and what batchway's own sampler takes for them."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from contract.jobs import SamplingParams
from workers.engine.grammar import Grammars
from workers.engine.interface import Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.sampler import sample

NUM_TOKENS, PROMPT = 20, [40, 41, 42, 41, 43]
_GRAMMAR = '{"grammars": [{"lark_grammar": "start: /[a-f]{4,30}/"}]}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "limits": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 2.0},
    "penalties": {
        "temperature": 1.0,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
    },
    "bias": {"temperature": 0.0, "logit_bias": {7: 30.0, 9: -100.0}},
    "least length": {"temperature": 0.0, "min_tokens": 12, "logit_bias": {1: 50.0}},
    "grammar": {"temperature": 1.0, "grammar": _GRAMMAR},
    "greedy grammar": {"temperature": 0.0, "grammar": _GRAMMAR, "frequency_penalty": 1.0},
}


class Scores:
    """Logits from the last token and the position; some tokens are often likely."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seeds = np.random.default_rng(seed).integers(0, 2**31, size=(512,))
        self.vocab_size = vocab_size

    def __call__(self, sequence: Sequence, draft: Seq[int] = ()) -> torch.Tensor:
        """(1, vocab_size), after the sequence and the draft."""
        place = len(sequence.token_ids) + len(draft)
        last_id = [*sequence.token_ids, *draft][-1]
        generator = torch.Generator().manual_seed(int(self._seeds[place]) + last_id)
        logits = torch.randn((1, self.vocab_size), generator=generator)
        logits[0, 68:76] += 3.0
        return logits


def sequence_of(
    params: dict[str, Any],
    token_ids: Seq[int] = (),
    num_tokens: int = NUM_TOKENS,
    num_prompt: int = len(PROMPT),
) -> Sequence:
    return Sequence(
        job_id="job",
        epoch=1,
        choice=0,
        tenant="t",
        lane="standard",
        token_ids=list(token_ids) or list(PROMPT),
        num_prompt=num_prompt,
        params=SamplingParams(max_tokens=num_tokens + 1, seed=7, **params),
        ending_ids=frozenset((1,)),
    )


def masks_of(sequence: Sequence, grammars: Grammars) -> StepMasks | None:
    """The tokens that its grammar forbids after the output, from a matcher of its own."""
    if not sequence.params.grammar:
        return None
    output = sequence.token_ids[sequence.num_prompt :]
    matcher = grammars.matcher(sequence.params.grammar, output)
    grammars.start_masks({matcher: ()})
    assert matcher.mask is not None
    return StepMasks({sequence: matcher.mask})


def own_token(logits: torch.Tensor, sequence: Sequence, grammars: Grammars) -> int:
    """The token that batchway's own sampler takes."""
    [found] = sample(logits, [sequence], masks=masks_of(sequence, grammars))
    assert isinstance(found, Sample)
    return found.token_id
