"""Sampling on vLLM's old runner: our own, as `workers.model.sampler` draws.

Jobs that sample, or change their logits, run as greedy ones in vLLM; the processor leaves the
chosen token as the row's only finite logit. Its noise depends on seed and position, and penalties
count the logged output.

Interface: `vllm.v1.sample.logits_processor.LogitsProcessor`.
"""

import contextlib

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from workers.engine.grammar import GrammarFailed, Matcher
from workers.engine.interface import RowFailed
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.sampler import sample
from workers.vllm_engine.sampling import ChoiceParams, choice_of, grammars_of


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
        choice = choice_of(params)
        if choice is None or prompt_ids is None:
            return None
        matcher: Matcher | None = None
        if choice.params.grammar and self._grammars is not None:
            with contextlib.suppress(GrammarFailed):  # the engine has found it too
                logged_ids = prompt_ids[choice.num_prompt :]
                matcher = self._grammars.matcher(choice.params.grammar, logged_ids)
        return _known_choice(choice, prompt_ids, matcher)


def _known_choice(choice: ChoiceParams, prompt_ids: list[int], matcher: Matcher | None) -> Sequence:
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
