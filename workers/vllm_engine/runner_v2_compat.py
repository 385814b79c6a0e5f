"""What vLLM's sampler lacks on Model Runner V2: grammars, and penalties that count logged output.

A resumed choice comes to vLLM as a prompt that ends with its logged output.

Interface: `vllm.v1.worker.gpu.sample.logits_processor`. A choice has a row of logits, and with
speculative decoding one more for each token of its draft. Nothing here waits for a forward: before
it, a copy of what constrained choices have is started, and beside it their masks are computed, as
for vLLM's own structured output. vLLM shows processors no drafts at that time; so
`from_request_state` is replaced below, which scripts/vllm-contract tests.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

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
from xgrammar import apply_token_bitmask_inplace

from contract.jobs import SamplingParams
from workers.engine.grammar import GrammarFailed, Matcher
from workers.model.sampler import penalise
from workers.vllm_engine.sampling import choice_of, grammars_of

# Beyond them vLLM's own processors fail in a step, which ends the engine.
MAX_BIASES = 1024
MAX_ENDING_IDS = 128

_from_request_state = LogitsProcRequestState.from_request_state


def _with_drafts(req_states: Any) -> LogitsProcRequestState:
    """Adds the drafts of the next step: int64, shape (max_num_reqs, most tokens of a draft)."""
    state = _from_request_state(req_states)
    object.__setattr__(state, "draft_tokens", req_states.draft_tokens)
    return state


LogitsProcRequestState.from_request_state = staticmethod(_with_drafts)


@dataclass(eq=False)
class _Constrained:
    grammar: str
    num_consumed: int  # known tokens that the matcher has seen, the prompt included
    matcher: Matcher | None = None
    draft: tuple[int, ...] = ()  # of this step, as far as the grammar allows it


@dataclass(frozen=True)
class _Copy:
    """What constrained choices have before a step, on its way to the host."""

    choices: dict[int, _Constrained]  # by slot
    numbers: Tensor  # for each: the number of its known tokens, the new ones, and its draft
    num_new: int
    is_done: torch.cuda.Event


class CountedOutput(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed here
    """The processor of one sampling process; its state is by vLLM's slots for requests."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._state = req_states
        self._max_rows = 1 + req_states.draft_tokens.shape[1]  # of a choice
        self._grammars = grammars_of(vllm_config)
        self._constrained: dict[int, _Constrained] = {}
        self._copy: _Copy | None = None
        # parameters, and tokens of the prompt
        self._penalised: dict[int, tuple[SamplingParams, int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None:
        """Raises ValueError for what vLLM would accept, and then die of. Sets what vLLM's own check
        before this one refuses beside speculative decoding."""
        if (choice := choice_of(sampling_params)) is not None:
            sampling_params.logit_bias = choice.params.logit_bias or None
            sampling_params.min_p = choice.params.min_p
            sampling_params._bad_words_token_ids = [list(ids) for ids in choice.params.bad_words]
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
        if params.grammar and self._grammars is not None:
            self._constrained[req_idx] = _Constrained(params.grammar, num_prompt)
        return req_idx in self._penalised or req_idx in self._constrained

    def apply_staged_writes(self) -> None:
        """Starts the copy for this step; vLLM calls it before the forward."""
        self._advance()
        if not self._constrained:
            return
        slots = list(self._constrained)
        starts = [choice.num_consumed for choice in self._constrained.values()]
        # A step adds `_max_rows` at most; a new choice has its logged output.
        num_new = max(self._max_rows, int((self._state.prefill_len.np[slots] - starts).max()))
        slot, start = async_tensor_h2d(
            [slots, starts], dtype=torch.int64, device=self._state.device
        ).unbind()
        known = self._state.all_token_ids.gpu
        places = start[:, None] + torch.arange(num_new, device=slot.device)
        new_ids = known[slot[:, None], places.clamp(max=known.shape[1] - 1)]
        parts = self._state.total_len.gpu[slot][:, None], new_ids, self._state.draft_tokens[slot]
        numbers = torch.cat([part.long() for part in parts], dim=1).to("cpu", non_blocking=True)
        is_done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        is_done.record()
        self._copy = _Copy(dict(self._constrained), numbers, num_new, is_done)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """logits (num_rows, vocab_size) float32, changed in place."""
        slots: list[int] = ctx.idx_mapping_np.tolist()
        penalised = [place for place, slot in enumerate(slots) if slot in self._penalised]
        if penalised:
            self._penalise(logits, ctx, penalised)
        self._advance()
        constrained = [slot for slot in slots if slot in self._constrained]
        if constrained:
            self._mask(logits, ctx, constrained)
        return logits

    def _penalise(self, logits: Tensor, ctx: LogitsContext, places: list[int]) -> None:
        """Applies the penalties of the output, for some places of the batch."""
        slots = ctx.idx_mapping_np[places].tolist()
        params, num_prompt = zip(*(self._penalised[slot] for slot in slots), strict=True)
        num_output = int((ctx.seq_lens_upper_bound_np[places] - np.array(num_prompt)).max())
        if num_output <= 0:
            return
        slot, first = async_tensor_h2d(
            [slots, num_prompt], dtype=torch.int64, device=logits.device
        ).unbind()
        rows = self._rows(ctx, slot)
        num_rows = rows.shape[1]
        row = rows.view(-1, 1)
        slot, first = (each.repeat_interleave(num_rows)[:, None] for each in (slot, first))
        position = first + torch.arange(num_output, device=logits.device)
        num_back = ctx.pos[row] - position
        # The tokens of a draft are only in the inputs of the rows after the first.
        draft = ctx.input_ids[(row - num_back).clamp(0, len(logits) - 1)]
        known = self._state.all_token_ids.gpu
        ids = known[slot, position.clamp(max=known.shape[1] - 1)]
        ids = torch.where(num_back < ctx.expanded_local_pos[row], draft, ids).long().clamp(min=0)
        is_output = num_back >= 0
        ids = torch.where(is_output, ids, ids[:, :1])
        scores = logits[row[:, 0]]
        each_row = [own for own in params for _ in range(num_rows)]
        penalise(scores, range(len(row)), each_row, ids, is_output)
        logits[row[:, 0]] = scores

    def _rows(self, ctx: LogitsContext, slots: Tensor) -> Tensor:
        """The rows of logits of some slots, int64, shape (n, most rows of a slot), with the last
        one again where a slot has fewer."""
        slot, number = ctx.expanded_idx_mapping.long(), ctx.expanded_local_pos.long()
        zeros = number.new_zeros(self._state.max_num_reqs)
        numbers = torch.arange(self._num_rows(ctx), device=slot.device)
        first = zeros.index_put((slot,), torch.arange(len(slot), device=slot.device) - number)
        last = zeros.scatter_reduce(0, slot, number, "amax")
        rows: Tensor = first[slots][:, None] + torch.minimum(numbers, last[slots][:, None])
        return rows

    def _num_rows(self, ctx: LogitsContext) -> int:
        """The most rows of a slot in this step."""
        return self._max_rows if len(ctx.pos) > len(ctx.idx_mapping_np) else 1

    def _advance(self) -> None:
        """Waits for the copy of this step, if nobody has, and consumes what it brings."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        copy.is_done.synchronize()
        for (slot, choice), (num_known, *ids) in zip(
            copy.choices.items(), copy.numbers.tolist(), strict=True
        ):
            if self._constrained.get(slot) is choice:
                new_ids = ids[: num_known - choice.num_consumed]
                choice.num_consumed = num_known
                if not self._consumes(choice, new_ids, ids[copy.num_new :]):
                    del self._constrained[slot]

    def _consumes(self, choice: _Constrained, new_ids: list[int], draft: list[int]) -> bool:
        """Whether the choice needs masks. Not after its grammar's end or a failure: the engine
        finds both too, and ends the request."""
        assert self._grammars is not None
        try:
            if choice.matcher is None:
                choice.matcher = self._grammars.matcher(choice.grammar)
            for token_id in new_ids:
                choice.matcher.consume(token_id)
        except GrammarFailed:
            return False
        vocab_size = self._grammars.vocab_size
        possible = [*takewhile(lambda token_id: 0 <= token_id < vocab_size, draft)]
        choice.draft = tuple(possible[: choice.matcher.num_allowed(possible)])
        return not choice.matcher.is_complete

    def _mask(self, logits: Tensor, ctx: LogitsContext, slots: list[int]) -> None:
        """Forbids the tokens that the slots' grammars do. After a token of a draft that is refused,
        the rest of its rows are not read, and allow all."""
        assert self._grammars is not None
        num_rows = self._num_rows(ctx)
        shape = 1 + len(slots) * num_rows, self._grammars.num_mask_words
        mask = torch.full(shape, -1, dtype=torch.int32, pin_memory=logits.is_cuda)
        first = np.zeros(self._state.max_num_reqs, dtype=np.int64)  # 0: the row that allows all
        first[slots] = range(1, len(mask), num_rows)
        choices = [(self._constrained[slot], int(first[slot])) for slot in slots]
        drafts = [(c.matcher, row, c.draft[: num_rows - 1]) for c, row in choices if c.matcher]
        self._grammars.fill(mask.numpy(), drafts)
        chosen = async_tensor_h2d(first, device=logits.device)[ctx.expanded_idx_mapping]
        chosen = torch.where(chosen > 0, chosen + ctx.expanded_local_pos, 0)
        allowed = async_tensor_h2d(mask, device=logits.device)[chosen]
        apply_token_bitmask_inplace(logits, allowed, vocab_size=logits.shape[1])
