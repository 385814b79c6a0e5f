"""What vLLM's sampler lacks on Model Runner V2: grammars, and penalties that count logged output.

A resumed choice comes to vLLM as a prompt that ends with its logged output.

Interface: `vllm.v1.worker.gpu.sample.logits_processor`, with one row for each request.
"""

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from contract.jobs import SamplingParams
from workers.engine.grammar import GrammarFailed, Matcher
from workers.model.sampler import penalise
from workers.vllm_engine.sampling import choice_of, grammars_of

# Beyond them vLLM's own processors fail in a step, which ends the engine.
MAX_BIASES = 1024
MAX_ENDING_IDS = 128


@dataclass
class _Constrained:
    grammar: str
    num_prompt: int
    num_consumed: int  # known tokens that the matcher has seen, the prompt included
    matcher: Matcher | None = None


class CountedOutput(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed here
    """The processor of one sampling process; its state is by vLLM's slots for requests."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._state = req_states
        self._grammars = grammars_of(vllm_config)
        self._constrained: dict[int, _Constrained] = {}
        # parameters, and tokens of the prompt
        self._penalised: dict[int, tuple[SamplingParams, int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None:
        """Raises ValueError for what vLLM would accept, and then die of."""
        if len(sampling_params.logit_bias or ()) > MAX_BIASES:
            raise ValueError(f"logit_bias has more than {MAX_BIASES} tokens")
        if sampling_params.min_tokens and len(sampling_params.stop_token_ids) > MAX_ENDING_IDS:
            raise ValueError(f"min_tokens with more than {MAX_ENDING_IDS} ending tokens")

    def add_request(self, req_idx: int, sampling_params: VllmParams) -> bool:
        self._constrained.pop(req_idx, None)
        self._penalised.pop(req_idx, None)
        choice = choice_of(sampling_params)
        if choice is None:
            return False
        params, num_prompt = choice.params, choice.num_prompt
        if params.presence_penalty or params.frequency_penalty:
            # The repetition penalty, which counts the prompt too, is vLLM's own.
            self._penalised[req_idx] = replace(params, repetition_penalty=1.0), num_prompt
        if params.grammar:
            self._constrained[req_idx] = _Constrained(params.grammar, num_prompt, num_prompt)
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """logits (num_rows, vocab_size) float32, changed in place."""
        slots: list[int] = ctx.idx_mapping_np.tolist()
        penalised = [row for row, slot in enumerate(slots) if slot in self._penalised]
        if penalised:
            self._penalise(logits, ctx, penalised)
        constrained = [row for row, slot in enumerate(slots) if slot in self._constrained]
        if constrained:
            self._mask(logits, ctx, constrained)
        return logits

    def _penalise(self, logits: Tensor, ctx: LogitsContext, rows: list[int]) -> None:
        """Applies the penalties of the rows' output, without waiting for the device."""
        slots = ctx.idx_mapping_np[rows]
        params, num_prompt = zip(*(self._penalised[slot] for slot in slots.tolist()), strict=True)
        num_output = int((ctx.seq_lens_upper_bound_np[rows] - np.array(num_prompt)).max())
        if num_output <= 0:
            return
        index, slot_index, firsts = async_tensor_h2d(
            [rows, slots.tolist(), num_prompt], dtype=torch.int64, device=logits.device
        ).unbind()
        places = firsts[:, None] + torch.arange(num_output, device=logits.device)
        known = self._state.all_token_ids.gpu
        ids = known[slot_index[:, None], places.clamp(max=known.shape[1] - 1)].long()
        is_output = places <= ctx.pos[index][:, None]
        scores = logits[index]
        penalise(
            scores, range(len(rows)), params, torch.where(is_output, ids, ids[:, :1]), is_output
        )
        logits[index] = scores

    def _mask(self, logits: Tensor, ctx: LogitsContext, rows: list[int]) -> None:
        """Forbids the tokens that the rows' grammars do. Waits for the tokens of the last step."""
        if self._grammars is None:
            return
        index = async_tensor_h2d(rows, dtype=torch.int64, device=logits.device)
        last_ids = ctx.input_ids[index].tolist()
        lengths = (ctx.pos[index] + 1).tolist()
        matchers: dict[int, Matcher] = {}  # by row
        for row, last_id, length in zip(rows, last_ids, lengths, strict=True):
            slot = int(ctx.idx_mapping_np[row])
            if length >= self._state.prefill_len.np[slot]:  # else part of a prompt, not sampled
                matcher = self._advanced(slot, last_id, length)
                if matcher is not None:
                    matchers[row] = matcher
        if not matchers:
            return
        self._grammars.start_masks(dict.fromkeys(matchers.values(), ()))
        masks = [matcher.mask for matcher in matchers.values()]
        forbidden = np.stack([mask.found.result()[mask.row] for mask in masks if mask is not None])
        index = async_tensor_h2d(list(matchers), dtype=torch.int64, device=logits.device)
        mask = async_tensor_h2d(forbidden, device=logits.device)
        logits[index] = logits[index].masked_fill(mask, float("-inf"))

    def _advanced(self, slot: int, last_id: int, length: int) -> Matcher | None:
        """The slot's matcher after its `length` known tokens; None once it has failed, which the
        engine finds too."""
        choice = self._constrained[slot]
        token_ids = [last_id]
        if length != choice.num_consumed + 1:
            token_ids = self._state.all_token_ids.gpu[slot, choice.num_consumed : length].tolist()
        try:
            if choice.matcher is None:
                assert self._grammars is not None
                choice.matcher = self._grammars.matcher(choice.grammar)
            for token_id in token_ids:
                choice.matcher.consume(token_id)
        except GrammarFailed:
            del self._constrained[slot]
            return None
        choice.num_consumed = length
        return choice.matcher
