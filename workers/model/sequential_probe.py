"""Checks a decoder that runs one sequence at a time: how its state may continue, and its size.

The reference is the family's forward over a whole sequence without state. If continuing inside a
prompt gives other results, only single tokens continue; if that fails too, nothing does.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from workers.engine.interface import Chunk, ModelRefused
from workers.engine.sequence import Sequence
from workers.model.checkpoint import first_line
from workers.model.probe import LOWEST_COSINE, centred, probe_ids, probe_sequence
from workers.model.sequential import Continues, SequentialRunner, kept_state, state_bytes

_PROBE_LENGTHS = (19, 13)
# Chunk ends of the probe: a prompt in three chunks, then single tokens.
_CHUNK_ENDS = (4, 9, 11)
# 1 - cosine that rounding explains. Above it, prompts are computed in one piece, as `generate`
# does: Zamba2 and Nemotron-H continue with less precision than they start.
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@dataclass(frozen=True, slots=True)
class StateShape:
    """Bytes of a sequence's state: a constant part, and a part per token."""

    sequence_bytes: int
    token_bytes: int


@torch.inference_mode()
def choose_continuation(decoder: Any, config: PretrainedConfig, device: torch.device) -> Continues:
    """The most permissive continuation with correct results. Raises ModelRefused."""
    name = type(decoder).__name__
    prompts = [probe_ids(config, n, device) for n in _PROBE_LENGTHS]
    try:
        expected = [decoder(input_ids=ids, use_cache=False).logits[0].float() for ids in prompts]
    except Exception as exc:
        raise ModelRefused(f"{name} does not run on plain tokens: {first_line(exc)}") from exc
    bound, rounding = 1.0 - LOWEST_COSINE[decoder.dtype], _ROUNDING[decoder.dtype]
    if not _error(decoder, Continues.NEVER, prompts, expected, device) <= bound:
        raise ModelRefused(
            f"{name} gives a token other logits when more tokens follow it, so it is no decoder "
            "that can be run token by token"
        )
    at_tokens = _error(decoder, Continues.AT_TOKENS, prompts, expected, device)
    if not at_tokens <= bound:
        return Continues.NEVER
    anywhere = _error(decoder, Continues.ANYWHERE, prompts, expected, device)
    return Continues.ANYWHERE if max(at_tokens, anywhere) <= rounding else Continues.AT_TOKENS


@torch.inference_mode()
def measure_state(decoder: Any, config: PretrainedConfig, device: torch.device) -> StateShape:
    """Measures the state at two lengths; a longer window counts as unlimited."""
    short, long = 4, 12
    sizes = []
    for num_tokens in (short, long):
        output = decoder(input_ids=probe_ids(config, num_tokens, device), use_cache=True)
        sizes.append(state_bytes(kept_state(output)))
    token_bytes = -(-(sizes[1] - sizes[0]) // (long - short))
    return StateShape(max(0, sizes[0] - short * token_bytes), token_bytes)


def _error(
    decoder: Any,
    continues: Continues,
    prompts: list[Tensor],
    expected: list[Tensor],
    device: torch.device,
) -> float:
    """Largest 1 - cosine over samples of two alternating sequences; inf if it raises."""
    runner = SequentialRunner(
        decoder,
        continues,
        num_blocks=1,
        block_size=1,
        eos_token_ids=frozenset(),
        max_model_len=max(_PROBE_LENGTHS),
        device=device,
    )
    sequences = [probe_sequence([], prompt.shape[1]) for prompt in prompts]
    worst = 0.0
    try:
        for end in range(max(_PROBE_LENGTHS) + 1):
            for sequence, prompt, logits in zip(sequences, prompts, expected, strict=True):
                if end in _CHUNK_ENDS or max(_CHUNK_ENDS) < end <= prompt.shape[1]:
                    found = _take_chunk(runner, sequence, prompt, end)
                    worst = max([worst, *(_distance(row, logits[end - 1]) for row in found)])
    except Exception:  # whatever it raises, it cannot continue
        return float("inf")
    return worst


def _take_chunk(runner: SequentialRunner, sequence: Sequence, prompt: Tensor, end: int) -> Tensor:
    """Computes up to `end`, sampling from the prompt's last chunk on -> (0 or 1, vocab_size)."""
    samples = end >= _CHUNK_ENDS[-1]
    num_known = end if samples else _CHUNK_ENDS[-1]
    sequence.token_ids[:] = prompt[0, :num_known].tolist()
    start = sequence.num_computed
    logits = runner.logits([Chunk(sequence, start, end - start, samples)])
    sequence.num_computed = end
    return logits


def _distance(found: Tensor, expected: Tensor) -> float:
    """1 - cosine of logits (vocab_size,), mean removed; inf if not finite."""
    cosine = torch.cosine_similarity(centred(found.double()), centred(expected.double()), dim=-1)
    distance = 1.0 - float(cosine)
    return distance if math.isfinite(distance) else float("inf")
