"""A logits processor for vLLM that chooses tokens as `workers.model.sampler` does.

vLLM's own sampler draws from a generator whose state is lost with the process, and counts penalties
over what it generated itself. A resumed job must draw the same noise at the same position, and its
penalties must count the output that is already logged. So jobs that sample, or change their logits,
run as greedy ones in vLLM; this processor leaves the chosen token as the row's only finite logit.

Interface: `vllm.v1.sample.logits_processor.LogitsProcessor`.
"""

from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from contract.jobs import SamplingParams
from workers.engine.model import RowFailed
from workers.engine.request import ErrorCode, RequestRefused
from workers.engine.sequence import Sequence
from workers.model.penalties import asks_for_change
from workers.model.sampler import LOWEST_TEMPERATURE, sample

EXTRA = "batchway"  # the key in vLLM's `SamplingParams.extra_args`


class Choice(msgspec.Struct, frozen=True):
    """What the processor must know of a choice; the token ids come from vLLM."""

    params: SamplingParams
    choice: int
    num_prompt: int  # of the request's prompt ids; logged output follows them
    ending_ids: tuple[int, ...]


def with_plugin(sequence: Sequence) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams: greedy, and what `SeededSampling` must know if plain
    greedy search is not all that the choice asks for."""
    if sequence.params.temperature < LOWEST_TEMPERATURE and not asks_for_change(sequence):
        return {"temperature": 0.0}
    choice = Choice(
        sequence.params, sequence.choice, sequence.num_prompt, tuple(sequence.ending_ids)
    )
    return {"temperature": 0.0, "extra_args": {EXTRA: msgspec.json.encode(choice).decode()}}


def without_plugin(sequence: Sequence) -> dict[str, Any]:
    """Arguments for vLLM's own sampler. A choice that goes on draws from another seed, so that it
    does not repeat the noise of its first tokens; penalties count its logged output as prompt.
    Raises RequestRefused for what has no effect beside speculative decoding."""
    params = sequence.params
    if params.min_p or params.logit_bias:
        name = "min_p" if params.min_p else "logit_bias"
        message = f"{name} has no effect beside speculative decoding"
        raise RequestRefused(ErrorCode.BAD_PARAMETER, message)
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": max(0, params.min_tokens - sequence.num_output),
        "seed": (params.seed + (sequence.choice << 32) + sequence.num_output) % 2**63,
    }


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed here
    """One for each process that samples. A row's state is its `Sequence`, without blocks."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Sequence, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self._rows.pop(index, None)
            if (sequence := _sequence(params, prompt_ids)) is not None:
                self._rows[index] = (sequence, output_ids)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits (num_rows, vocab_size) float32, changed in place."""
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        index = torch.tensor(rows, device=logits.device)
        samples = sample(logits[index], [self._known(row) for row in rows])
        for row, chosen in zip(rows, samples, strict=True):
            if isinstance(chosen, RowFailed):
                continue  # NaN stays NaN
            logits[row] = float("-inf")
            logits[row, chosen.token_id] = 0.0
        return logits

    def _known(self, row: int) -> Sequence:
        """The row's sequence with the output that vLLM has generated since it came."""
        sequence, output_ids = self._rows[row]
        num_taken = sequence.num_computed  # of vLLM's output ids
        sequence.token_ids += output_ids[num_taken:]
        sequence.num_computed = len(output_ids)
        return sequence


def _sequence(params: VllmParams, prompt_ids: list[int] | None) -> Sequence | None:
    encoded = (params.extra_args or {}).get(EXTRA)
    if encoded is None or prompt_ids is None:
        return None
    choice = msgspec.json.decode(encoded, type=Choice)
    return Sequence(
        job_id="",
        epoch=0,
        choice=choice.choice,
        tenant="",
        lane="",
        token_ids=list(prompt_ids),
        num_prompt=choice.num_prompt,
        params=choice.params,
        ending_ids=frozenset(choice.ending_ids),
    )
