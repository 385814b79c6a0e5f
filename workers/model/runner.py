"""Runs a step: makes flat tensors of its chunks, computes their logits, and takes from these the
next tokens and the prompts' log probabilities. Pads only where the engine asks for it. Implements
the engine's Model.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from workers.engine.interface import (
    Chunk,
    Drawn,
    Padding,
    PromptLogprobs,
    Row,
    RowFailed,
    Sample,
)
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.attention.interface import STEP_KEYWORD, AttentionBackend, AttentionStep, RowSpan
from workers.model.fusion.stack import Stack
from workers.model.kv_cache import KVCache, PagedStep
from workers.model.native.kernels import Kernels
from workers.model.sampler import argmax, rank, ranked_sample, sample
from workers.model.states import StateCache

PAD_TOKEN_ID = 0  # any id: the result is not used

# Compute log probabilities of this many logits at once (64 MiB of float32).
_SLICE_ELEMENTS = 2**24


@dataclasses.dataclass(frozen=True, slots=True)
class StepTensors:
    """A step as tensors. input_ids and position_ids (1, T); slot_mapping (T,): the cache slot of
    each token; logits_index (num_rows,): the flat rows whose logits are needed, in chunk order:
    each chunk's `scored` positions, then its last ones, one for each of its `sampled`."""

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logits_index: Tensor
    spans: tuple[RowSpan, ...]
    scored: tuple[range, ...]


@dataclass(eq=False)
class ModelRunner:
    """A Hugging Face decoder with a paged KV cache."""

    shares_blocks = True

    _decoder: nn.Module
    cache: KVCache
    backend: AttentionBackend
    _: KW_ONLY
    eos_token_ids: frozenset[int]
    max_model_len: int
    device: torch.device
    kernels: Kernels | None = None
    states: StateCache | None = None

    def __post_init__(self) -> None:
        # Otherwise the head computes all rows.
        self._takes_index = "logits_to_keep" in inspect.signature(self._decoder.forward).parameters
        self.stack: Stack | None = None  # replaces the decoder's forward

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def num_state_slots(self) -> int:
        return 0 if self.states is None else self.states.num_slots

    @torch.inference_mode()
    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        if not chunks and not padding:
            return []
        batch = self._batch(chunks, padding)
        logits = self._compute(batch)
        return answer_chunks(logits, chunks, batch.scored, self.find_argmax, masks)

    @property
    def find_argmax(self) -> Callable[[Tensor], Tensor]:
        """See `argmax`."""
        return argmax if self.kernels is None else self.kernels.argmax

    @torch.inference_mode()
    def logits(self, chunks: Seq[Chunk], padding: Seq[Padding] = ()) -> Tensor:
        """Writes the chunks' KV; returns logits (num_rows, vocab_size) as in Batch.logits_index."""
        return self._compute(self._batch(chunks, padding))

    @torch.inference_mode()
    def padding_logits(self, padding: Seq[Padding]) -> Tensor:
        """The logits (num_tokens, vocab_size) of padding alone, used to measure a step."""
        batch = self._batch((), padding)
        index = torch.arange(batch.input_ids.shape[1], device=self.device)
        return self._compute(dataclasses.replace(batch, logits_index=index))

    def _batch(self, chunks: Seq[Chunk], padding: Seq[Padding]) -> StepTensors:
        self._copy_blocks(chunks)
        scratch_id = self.cache.scratch_block_id
        batch = build_batch(chunks, self.block_size, self.device, padding, scratch_id)
        if self.states is not None:
            self.states.begin(batch.spans, chunks)
        return batch

    def _compute(self, batch: StepTensors) -> Tensor:
        prepared = self.backend.prepare(batch.spans, self.device)
        step = PagedStep(self.cache, prepared, batch.slot_mapping, self.kernels)
        try:
            return self.forward(batch.input_ids, batch.position_ids, batch.logits_index, step)
        finally:
            if self.states is not None:
                self.states.end()

    def _copy_blocks(self, chunks: Seq[Chunk]) -> None:
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
        # A model without attention takes no step.
        arguments: dict[str, Any] = {STEP_KEYWORD: step} if self.cache.layers else {}
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


def build_batch(
    chunks: Seq[Chunk],
    block_size: int,
    device: torch.device,
    padding: Seq[Padding] = (),
    scratch_block_id: int = 0,
) -> StepTensors:
    """Concatenates the chunks, then padding, whose KV goes to one scratch block."""
    token_ids: list[int] = []
    block_ids: list[int] = []
    for chunk in chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        num_blocks = -(-end // block_size)
        assert chunk.start < end <= len(sequence.token_ids) + len(chunk.drafts)
        assert num_blocks <= len(sequence.block_ids), "the engine has not grown the table"
        token_ids += chunk.token_ids
        block_ids += sequence.block_ids[:num_blocks]
    for pad in padding:
        token_ids += [PAD_TOKEN_ID] * pad.num_tokens
        block_ids += [scratch_block_id] * -(-(pad.start + pad.num_tokens) // block_size)
    layout = _Layout((*chunks, *padding), block_size)
    slots = block_slots(block_ids, len(block_ids) * block_size, block_size)
    spans = layout.spans(slots)
    scored = tuple([scored_positions(c.sequence, c.start, c.start + c.num_tokens) for c in chunks])
    rows: list[int] = []
    for chunk, span, wanted in zip(chunks, spans, scored, strict=False):  # padding has none
        if wanted:
            rows += [span.first + position - span.start for position in wanted]
        if chunk.samples:
            stop = span.first + span.num_tokens
            rows += range(stop - 1 - len(chunk.drafts), stop)
    mapping = slots[layout.positions + layout.begins]
    num_tokens = len(token_ids)
    numbers = np.array([*token_ids, *rows], dtype=np.int64)
    parts = (numbers[:num_tokens], layout.positions, mapping, numbers[num_tokens:])
    shipped = torch.as_tensor(np.concatenate(parts), device=device)
    ids, positions, slot_mapping = shipped[: 3 * num_tokens].view(3, num_tokens)
    return StepTensors(
        input_ids=ids[None],
        position_ids=positions[None],
        slot_mapping=slot_mapping,
        logits_index=shipped[3 * num_tokens :],
        spans=spans,
        scored=scored,
    )


class _Layout:
    """The parts of a step: their tokens in the flat batch, and their sequences' slots (whole
    blocks) in one array."""

    def __init__(self, parts: Seq[Chunk | Padding], block_size: int) -> None:
        self._starts = np.array([part.start for part in parts], dtype=np.int64)
        self._counts = np.array([part.num_tokens for part in parts], dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        num_slots = -(-(self._starts + self._counts) // block_size) * block_size
        self._begins = np.cumsum(num_slots) - num_slots
        rows = np.arange(self._counts.sum())
        self.positions = rows + np.repeat(self._starts - self._firsts, self._counts)  # (T,)
        self.begins = np.repeat(self._begins, self._counts)  # (T,): of each token's sequence

    def spans(self, slots: npt.NDArray[np.int64]) -> tuple[RowSpan, ...]:
        """Returns a span for each part."""
        columns = (self._firsts, self._counts, self._starts, self._begins)
        return tuple(
            [
                RowSpan(first, count, start, slots[begin : begin + start + count])
                for first, count, start, begin in zip(*(c.tolist() for c in columns), strict=True)
            ]
        )


def block_slots(block_ids: Seq[int], num_tokens: int, block_size: int) -> npt.NDArray[np.int64]:
    """The cache slots (num_tokens,) of a sequence's first `num_tokens` positions."""
    num_blocks = -(-num_tokens // block_size)
    assert num_blocks <= len(block_ids)
    blocks = np.asarray(block_ids[:num_blocks], dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int64)
    flat: npt.NDArray[np.int64] = slots.reshape(-1)[:num_tokens]
    return flat


def scored_positions(sequence: Sequence, start: int, end: int) -> range:
    """Positions among `start .. end - 1` whose logits score the next prompt token; none unless the
    job asks."""
    if not sequence.scores_prompt:
        return range(start, start)
    return range(start, max(start, min(end, sequence.num_prompt - 1)))


def answer_chunks(
    logits: Tensor,
    chunks: Seq[Chunk],
    scored: Seq[range],
    find_argmax: Callable[[Tensor], Tensor] = argmax,
    masks: StepMasks | None = None,
) -> list[Row]:
    """Returns one row per chunk. logits (num_rows, vocab_size): for each chunk its scored
    positions, then its last positions, one for each of its `sampled`."""
    prompts: list[PromptLogprobs | None] = []
    sample_rows: list[int] = []
    num_rows = 0
    for chunk, positions in zip(chunks, scored, strict=True):
        prompt = None
        if positions:  # slicing a tensor costs microseconds
            part = logits[num_rows : num_rows + len(positions)]
            prompt = _score_prompt(part, chunk.sequence, positions.start)
            num_rows += len(positions)
        prompts.append(prompt)
        num_sampled = len(chunk.sampled)
        sample_rows += range(num_rows, num_rows + num_sampled)
        num_rows += num_sampled
    if len(sample_rows) < num_rows:
        logits = logits[torch.tensor(sample_rows, dtype=torch.int64, device=logits.device)]
    sampling = [sequence for chunk in chunks for sequence in chunk.sampled]
    samples = iter(sample(logits, sampling, find_argmax, masks))
    return [_answer(chunk, samples, prompt) for chunk, prompt in zip(chunks, prompts, strict=True)]


def _answer(
    chunk: Chunk, samples: Iterator[Sample | RowFailed], prompt: PromptLogprobs | None
) -> Row:
    """Takes the chunk's samples from those of the step."""
    if chunk.drafts:
        return Drawn(tuple(islice(samples, len(chunk.sampled))))
    if not chunk.samples:
        return prompt
    row = next(samples)
    if prompt is None or not isinstance(row, Sample):
        return row
    return Sample(row.token_id, row.logprob, row.top_logprobs, prompt)


def _score_prompt(logits: Tensor, sequence: Sequence, start: int) -> PromptLogprobs:
    """Scores n tokens from logits (n, vocab_size) of positions `start ..`."""
    num_top = min(sequence.params.prompt_logprobs or 0, logits.shape[1])
    at_once = max(1, _SLICE_ELEMENTS // logits.shape[1])
    tokens: list[Sample] = []
    for part in torch.split(logits, at_once):
        first = start + 1 + len(tokens)
        ids = sequence.token_ids[first : first + len(part)]
        ranked = rank(part, torch.tensor(ids, device=logits.device), num_top).tolist()
        tokens += [ranked_sample(*pair, num_top) for pair in zip(ids, ranked, strict=True)]
    return PromptLogprobs(start + 1, tuple(tokens))
