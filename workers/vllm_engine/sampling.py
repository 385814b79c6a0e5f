"""A logits processor for vLLM that chooses tokens as `workers.model.sampler` does.

vLLM's own sampler draws from a generator whose state is lost with the process, and counts penalties
over what it generated itself. A resumed job must draw the same noise at the same position, and its
penalties must count the output that is already logged. So jobs that sample, or change their logits,
run as greedy ones in vLLM; this processor leaves the chosen token as the row's only finite logit.

Interface: `vllm.v1.sample.logits_processor.LogitsProcessor`.
"""

import contextlib
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

from contract.errors import ErrorCode
from contract.jobs import SamplingParams
from workers.engine.grammar import GrammarFailed, Grammars, Matcher
from workers.engine.interface import RowFailed
from workers.engine.masks import StepMasks
from workers.engine.request import RequestRefused
from workers.engine.sequence import Sequence
from workers.model.checkpoint import DEFAULT_REVISION
from workers.model.files import Files
from workers.model.generation import end_token_ids
from workers.model.penalties import asks_for_change
from workers.model.sampler import LOWEST_TEMPERATURE, sample
from workers.model.tokenizer import read_tokenizer

EXTRA = "batchway"  # the key in vLLM's `SamplingParams.extra_args`


class Choice(msgspec.Struct, frozen=True):
    """What the processor must know of a choice; the token ids come from vLLM."""

    params: SamplingParams
    choice: int
    num_prompt: int  # of the request's prompt ids; logged output follows them
    ending_ids: tuple[int, ...]


def with_plugin(sequence: Sequence) -> dict[str, Any]:
    """Returns arguments of vLLM's SamplingParams: greedy, and what `SeededSampling` must know if
    the choice asks for more than plain greedy search."""
    params = sequence.params
    is_greedy = params.temperature < LOWEST_TEMPERATURE and not asks_for_change(sequence)
    if is_greedy and not params.grammar:
        return {"temperature": 0.0}
    choice = Choice(params, sequence.choice, sequence.num_prompt, tuple(sequence.ending_ids))
    return {"temperature": 0.0, "extra_args": {EXTRA: msgspec.json.encode(choice).decode()}}


def without_plugin(sequence: Sequence) -> dict[str, Any]:
    """Returns arguments for vLLM's own sampler. A resumed choice draws from another seed, so that
    it does not repeat the noise of its first tokens; penalties count its logged output as prompt.
    Raises RequestRefused for parameters without effect beside speculative decoding."""
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


def grammars_of(config: VllmConfig) -> Grammars | None:
    """Returns the compiler of grammars; None if llguidance cannot read the model's tokenizer."""
    model = config.model_config
    revision = model.revision or DEFAULT_REVISION
    tokenizer = read_tokenizer(model.model, revision)
    end_ids = end_token_ids(Files(model.model, revision), model.hf_config, tokenizer)
    try:
        return Grammars(tokenizer.tokenizer_json, model.get_vocab_size(), end_ids)
    except GrammarFailed:
        return None


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed here
    """The processor of one sampling process. A row's state is its `Sequence`, without blocks."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Sequence, list[int]]] = {}
        self._grammars = grammars_of(vllm_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self._rows.pop(index, None)
            if (sequence := self._sequence(params, prompt_ids)) is not None:
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
        sequences = [self._known(row) for row in rows]
        samples = sample(logits[index], sequences, masks=self._masks(sequences))
        for row, chosen in zip(rows, samples, strict=True):
            if isinstance(chosen, RowFailed):
                continue  # NaN stays NaN
            logits[row] = float("-inf")
            logits[row, chosen.token_id] = 0.0
        return logits

    def _known(self, row: int) -> Sequence:
        """The row's sequence with the output that vLLM has generated since it came."""
        sequence, output_ids = self._rows[row]
        new_ids = output_ids[sequence.num_computed :]  # counts vLLM's output ids
        sequence.token_ids += new_ids
        sequence.num_computed = len(output_ids)
        if sequence.matcher is not None:
            try:
                for token_id in new_ids:
                    sequence.matcher.consume(token_id)
            except GrammarFailed:  # the engine finds it too, and fails the job
                sequence.matcher = None
        return sequence

    def _masks(self, sequences: list[Sequence]) -> StepMasks | None:
        constrained = {s: s.matcher for s in sequences if s.matcher is not None}
        if not constrained or self._grammars is None:
            return None
        self._grammars.start_masks(dict.fromkeys(constrained.values(), ()))
        return StepMasks({s: m.mask for s, m in constrained.items() if m.mask is not None})

    def _sequence(self, params: VllmParams, prompt_ids: list[int] | None) -> Sequence | None:
        encoded = (params.extra_args or {}).get(EXTRA)
        if encoded is None or prompt_ids is None:
            return None
        choice = msgspec.json.decode(encoded, type=Choice)
        matcher: Matcher | None = None
        if choice.params.grammar and self._grammars is not None:
            with contextlib.suppress(GrammarFailed):  # the engine has found it too
                logged_ids = prompt_ids[choice.num_prompt :]
                matcher = self._grammars.matcher(choice.params.grammar, logged_ids)
        return _known_choice(choice, prompt_ids, matcher)


def _known_choice(choice: Choice, prompt_ids: list[int], matcher: Matcher | None) -> Sequence:
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
        matcher=matcher,
    )
