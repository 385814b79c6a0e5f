"""Runs a step: chunks in, samples out. Implements the engine's Model."""

import dataclasses
import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from workers.engine.interface import Chunk, Padding, Row
from workers.engine.masks import StepMasks
from workers.model.answers import answer_chunks
from workers.model.attention.interface import STEP_KEYWORD, AttentionBackend, AttentionStep
from workers.model.batch import Batch, build_batch
from workers.model.kernels import DecoderKernels, likeliest
from workers.model.kv_cache import KVCache, PagedStep
from workers.model.surgery.stack import Stack


class ModelRunner:
    """A Hugging Face decoder with a paged KV cache."""

    shares_blocks = True
    runs_ahead = False

    def __init__(
        self,
        decoder: nn.Module,
        cache: KVCache,
        backend: AttentionBackend,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        device: torch.device,
        kernels: DecoderKernels | None = None,
    ) -> None:
        self.cache = cache
        self.backend = backend
        self._decoder = decoder
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self._device = device
        self.kernels = kernels
        # Otherwise the head computes all rows.
        self._takes_index = "logits_to_keep" in inspect.signature(decoder.forward).parameters
        self.stack: Stack | None = None  # replaces the decoder's forward

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @torch.inference_mode()
    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        if not chunks and not padding:
            return []
        batch = self._batch(chunks, padding)
        logits = self._compute(batch)
        return answer_chunks(logits, chunks, batch.scored, self.find_likeliest, masks)

    @property
    def find_likeliest(self) -> Callable[[Tensor], Tensor]:
        """See DecoderKernels.likeliest."""
        return likeliest if self.kernels is None else self.kernels.likeliest

    @torch.inference_mode()
    def logits(self, chunks: Seq[Chunk], padding: Seq[Padding] = ()) -> Tensor:
        """Writes the chunks' KV; returns logits (num_rows, vocab_size) as in Batch.logits_index."""
        return self._compute(self._batch(chunks, padding))

    @torch.inference_mode()
    def logits_beside(
        self, chunks: Seq[Chunk], nexts: Seq[Chunk], token_ids: Tensor
    ) -> tuple[Tensor, tuple[range, ...]]:
        """Does `logits` for chunks and for `nexts`: single tokens behind the known ones, whose ids
        int64 (n,) only the device knows. Returns `scored` too."""
        batch = self._batch((*chunks, *nexts), ())
        num_known = batch.input_ids.shape[1] - len(nexts)
        batch.input_ids[0, num_known:] = token_ids
        return self._compute(batch), batch.scored

    @torch.inference_mode()
    def padding_logits(self, padding: Seq[Padding]) -> Tensor:
        """The logits (num_tokens, vocab_size) of padding alone, used to measure a step."""
        batch = self._batch((), padding)
        index = torch.arange(batch.input_ids.shape[1], device=self._device)
        return self._compute(dataclasses.replace(batch, logits_index=index))

    def _batch(self, chunks: Seq[Chunk], padding: Seq[Padding]) -> Batch:
        self.copy_blocks(chunks)
        scratch_id = self.cache.scratch_block_id
        return build_batch(chunks, self.block_size, self._device, padding, scratch_id)

    def _compute(self, batch: Batch) -> Tensor:
        prepared = self.backend.prepare(batch.spans, self._device)
        step = PagedStep(self.cache, prepared, batch.slot_mapping, self.kernels)
        return self.forward(batch.input_ids, batch.position_ids, batch.logits_index, step)

    def copy_blocks(self, chunks: Seq[Chunk]) -> None:
        """See Model.run."""
        copies = [
            (chunk.copy_from, chunk.sequence.block_ids[chunk.start // self.block_size])
            for chunk in chunks
            if chunk.copy_from is not None
        ]
        if copies:
            source_ids, target_ids = zip(*copies, strict=True)
            self.cache.copy_blocks(source_ids, target_ids)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_index: Tensor, step: AttentionStep
    ) -> Tensor:
        """Runs the ForCausalLM on a flat batch -> (num_rows, vocab_size) logits; see Batch.

        The whole model, because scaling and capping of logits are in its head.
        """
        if self.stack is not None:
            return self.stack.forward(input_ids, position_ids, logits_index, step)
        arguments: dict[str, Any] = {STEP_KEYWORD: step}
        if self._takes_index:
            arguments["logits_to_keep"] = logits_index
        output = self._decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            **arguments,
        )
        logits: Tensor = output.logits[0]
        return logits if self._takes_index else logits[logits_index]
