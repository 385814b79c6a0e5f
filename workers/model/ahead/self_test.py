"""Compares what a GPU computes with the reference, at load: attention, then rows and how they are
sampled, then graphs.

Each stage also compiles the kernels that it needs. A stage that raises has failed.
How steps follow each other is chosen by what passes. Draws are compared on logits whose likely
tokens are far enough apart that rounding decides nothing.

Over 300 lines: one comparison for each stage.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from workers.engine.interface import Chunk, ModelRefused, Sample
from workers.engine.sequence import Sequence
from workers.model.ahead.runner import AheadRunner
from workers.model.attention.interface import (
    PreparedAttention,
    Span,
)
from workers.model.attention.reference import SPLIT_TOKENS, ReferenceAttention, RowsStep
from workers.model.backend import Backend
from workers.model.checkpoint import first_line
from workers.model.gpu.drawing import draw
from workers.model.gpu.graphs import Record, recorder
from workers.model.gpu.request_state import RequestState
from workers.model.loaded import Loaded
from workers.model.probe import AttentionShape, probe_ids, probe_sequence, probe_sequences
from workers.model.proof import Choices, logits_difference
from workers.model.runner import ModelRunner, block_slots
from workers.model.sampler import sample
from workers.model.staging import to_device
from workers.model.surgery.surgeon import TOLERANCE

Draw = Callable[[Tensor, RequestState, Tensor, Seq[Sequence], Seq[int]], Tensor]

_FREE: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 0.6})
_LIMITED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.5, "top_k": 9, "top_p": 0.7, "min_p": 0.02},
)
# The prompts are of token 0, the output of the last token: both are among the likely ones.
_CHANGED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 4.0},
    {"temperature": 1.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"logit_bias": {0: -100.0, 1: 8.0}},
    {"temperature": 0.8, "top_k": 5, "min_tokens": 50},
)
# Parameters of each row: without limits and with them are two kernels, each of them for the model's
# type and for changed logits, which are float32.
_BATCHES = (_FREE, (*_LIMITED, *_FREE), (*_FREE, *_CHANGED[:3]), (*_LIMITED, *_CHANGED))
_NUM_LIKELY = 16
_SPACE = 0.5  # between their logits; exact in every type
_UNLIKELY = -30.0


def wrong_draws(
    state: RequestState, vocab_size: int, dtype: torch.dtype, draw_rows: Draw = draw
) -> str | None:
    """Describes rows for which `draw_rows` and the sampler differ; None if there are none. Compiles
    the kernels for this state and size of the vocabulary."""
    for batch in _BATCHES:
        for sequences in _groups(batch, state.num_rows, vocab_size - 1):
            logits = _logits(len(sequences), vocab_size, state.device).to(dtype)
            rows = to_device(np.array(_lined_up(state, sequences)), state.device)
            lengths = [sequence.num_known for sequence in sequences]
            found = draw_rows(logits, state, rows, sequences, lengths).tolist()
            samples = sample(logits, sequences)
            expected = [row.token_id if isinstance(row, Sample) else None for row in samples]
            if found != expected:
                return f"tokens {found} are drawn in place of {expected}"
    return None


def _groups(batch: Seq[dict[str, Any]], num_rows: int, last_id: int) -> Iterator[list[Sequence]]:
    """Yields one sequence for each row, at most `num_rows` at once."""
    for first in range(0, len(batch), num_rows):
        part = batch[first : first + num_rows]
        yield [_sequence(first + i, params, last_id) for i, params in enumerate(part)]


def _sequence(number: int, params: dict[str, Any], last_id: int) -> Sequence:
    num_prompt = 1 + number % 2
    token_ids = [0] * num_prompt + [last_id] * (1 + number)
    given = {"max_tokens": 99, "seed": number, "temperature": 0.0} | params
    sequence = probe_sequence(token_ids, num_prompt, **given)
    sequence.ending_ids = frozenset({0, last_id})
    return sequence


def _lined_up(state: RequestState, sequences: Seq[Sequence]) -> list[int]:
    """Copies the sequences' state to the device, and returns their rows."""
    for sequence in sequences:
        state.admit(sequence, sequences)
        state.place(sequence, sequence.token_ids[-1], sequence.num_known - 1)
    state.flush()
    return [state.row_of(sequence) for sequence in sequences]


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """float32 (num_rows, vocab_size): some likely tokens all over it, in each row in another
    order."""
    logits = torch.full((num_rows, vocab_size), _UNLIKELY)
    ids = torch.linspace(0, vocab_size - 1, min(_NUM_LIKELY, vocab_size)).long()
    for row in range(num_rows):
        logits[row, ids.roll(5 * row)] = -_SPACE * torch.arange(len(ids))
    return logits.to(device)


log = logging.getLogger("batchway.engine")

# (start, num_tokens) of each chunk. One context begins behind the last full block; one has a split
# more than the other.
_STAGES = {
    "chunk": ((0, 33), (21, 5)),
    "decode": ((0, 1), (40, 1)),
    "split decode": ((SPLIT_TOKENS + 9, 1), (21, 1)),
    "chunk beside decode": ((21, 33), (SPLIT_TOKENS + 9, 1)),
}
_PROMPTS = (((0, SPLIT_TOKENS + 33), (0, 70)), ((0, 200), (21, 33)))
_ROW_STARTS = (SPLIT_TOKENS + 9, 21)
_PROMPT_TOKENS = (12, 5)


class SelfTestFailed(ModelRefused):
    """The message names the stage and its largest difference."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"the self-test fails at {stage}: {reason}")


@torch.inference_mode()
def check_attention(backend: Backend, shapes: Collection[AttentionShape], loaded: Loaded) -> None:
    """Compares chunks, single tokens with short and long contexts, and rows whose tables are on the
    device, for each shape of the model's layers. Raises SelfTestFailed."""
    device = loaded.device
    for shape in shapes:
        trial = _Trial(shape, loaded.block_size, loaded.dtype, device)
        for stage, chunks in _STAGES.items():
            with _Stage(stage, device):
                trial.compare(stage, chunks, lambda spans: backend.attention.prepare(spans, device))
        with _Stage("prepared rows", device):
            rows = [(start, 1) for start in _ROW_STARTS]
            step = trial.rows_step()
            trial.compare("prepared rows", rows, lambda _: backend.prepare_rows(step))  # noqa: B023


def leave_prompts(backend: Backend, shapes: Collection[AttentionShape], loaded: Loaded) -> None:
    """Leaves whole prompts to torch's FlashAttention if that is right for each shape."""
    if backend.use_torch_prompts is None:
        return
    reasons = (wrong_prompts(s, loaded.block_size, loaded.dtype, loaded.device) for s in shapes)
    if reason := next(filter(None, reasons), None):
        log.warning("Triton's kernel attends prompts, not torch's FlashAttention: %s", reason)
    else:
        backend.use_torch_prompts()


@torch.inference_mode()
def wrong_prompts(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why torch's FlashAttention cannot attend whole prompts in place of Triton's kernel; None if
    it can, or leaves this shape to the kernel. Attends two prompts, one of them beside a chunk."""
    from workers.model.attention.triton_attention import TritonAttention

    trial = _Trial(shape, block_size, dtype, device)
    kernel, torchs = (TritonAttention(block_size, torch_prompts=on) for on in (False, True))
    try:
        for chunks in _PROMPTS:
            trial.compare(
                "prompts",
                chunks,
                lambda spans: torchs.prepare(spans, device),
                lambda spans: kernel.prepare(spans, device),
            )
    except SelfTestFailed as exc:
        return str(exc)
    except Exception as exc:  # of a build of torch without it
        return f"it raises {type(exc).__name__}: {first_line(exc)}"
    return None


class _Trial:
    """Attention on random numbers in one layer's shape; slots of no sequence contain NaN."""

    def __init__(
        self, shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._block_size = shape, block_size
        self._dtype, self._device = dtype, device
        longest = SPLIT_TOKENS + 64
        self._num_blocks = -(-longest // block_size)
        order = np.random.default_rng(0).permutation(2 * self._num_blocks)
        self._tables = order.reshape(2, self._num_blocks)  # of two sequences

    def compare(
        self,
        stage: str,
        chunks: Seq[tuple[int, int]],
        prepare: Callable[[list[Span]], PreparedAttention],
        prepare_other: Callable[[list[Span]], PreparedAttention] | None = None,
    ) -> None:
        """With the other or the reference. Raises SelfTestFailed, or what a kernel raises."""
        spans, first = [], 0
        for table, (start, num_tokens) in zip(self._tables, chunks, strict=True):
            slots = block_slots(table.tolist(), start + num_tokens, self._block_size)
            spans.append(Span(first, num_tokens, start, slots))
            first += num_tokens
        query, keys, values = self._tensors(spans)
        flags = self._shape.flags
        found = prepare(spans).attend(query, keys, values, flags)
        if prepare_other is None:
            other: PreparedAttention = ReferenceAttention().prepare(spans, self._device)
        else:
            other = prepare_other(spans)
        expected = other.attend(query, keys, values, flags)
        share = _largest_difference(found, expected)
        if not share <= TOLERANCE[self._dtype]:
            raise SelfTestFailed(stage, f"off by {share:.1e} of the largest number of a head")

    def rows_step(self) -> RowsStep:
        """The rows of `_ROW_STARTS`, in another order in the tables, behind a third row."""
        tables = torch.zeros(3, self._num_blocks, dtype=torch.int64)
        tables[2], tables[1] = map(torch.from_numpy, self._tables)
        rows = torch.tensor([2, 1], device=self._device)
        positions = torch.tensor(_ROW_STARTS, device=self._device)
        longest = self._num_blocks * self._block_size
        most_parts = 2 * -(-longest // SPLIT_TOKENS)
        tables = tables.to(self._device)
        return RowsStep(rows, positions, tables, most_parts, longest, self._block_size)

    def _tensors(self, spans: list[Span]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries are part of a wider tensor, as in a merged projection."""
        shape, generator = self._shape, torch.Generator().manual_seed(0)
        num_tokens = sum(span.num_tokens for span in spans)
        num_slots = self._tables.size * self._block_size

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(self._device, self._dtype)

        beside = random(num_tokens, (shape.num_heads + 2 * shape.kv_heads) * shape.k_dim)
        query = beside[:, : shape.num_heads * shape.k_dim].view(num_tokens, -1, shape.k_dim)
        keys = random(num_slots, shape.kv_heads, shape.k_dim)
        values = random(num_slots, shape.kv_heads, shape.v_dim)
        is_foreign = torch.ones(num_slots, dtype=torch.bool)
        for span in spans:
            is_foreign[torch.from_numpy(span.slots)] = False
        is_foreign = is_foreign.to(self._device)
        keys[is_foreign] = values[is_foreign] = float("nan")
        return query, keys, values


def _largest_difference(found: Tensor, expected: Tensor) -> float:
    """The difference as a share of the largest number of its head; NaN if there is one."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    difference = (found.float() - expected.float()).abs().amax(-1)
    return float((difference / expected.float().abs().amax(-1)).max())


@torch.inference_mode()
def check_rows(model: AheadRunner, runner: ModelRunner, config: PretrainedConfig) -> None:
    """Compares rows from state on the device, including a prompt's tokens, computed directly, and
    the tokens drawn from rows of logits. Raises SelfTestFailed."""
    rows = _Rows(model, runner, config)
    with _Stage("rows", rows.device), closing(rows):
        for chunks in rows.steps():
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            with Choices() as choices:
                expected = runner.logits(chunks)
            model.decoder.line_up(chunks)
            rows.spoil(chunks)
            with Choices(choices.made):
                found = model.decoder.compute(num_tokens, num_tokens, max(_PROMPT_TOKENS))
            rows.compare("rows", found[: len(chunks)], expected)
    with _Stage("sampling", rows.device):
        vocab_size = int(config.get_text_config().vocab_size)
        if reason := wrong_draws(model.state, vocab_size, runner.cache.dtype):
            raise SelfTestFailed("sampling", reason)


@torch.inference_mode()
def check_graphs(model: AheadRunner, runner: ModelRunner, config: PretrainedConfig) -> int:
    """Records all graphs and compares a replay of each with the same step, computed directly: other
    sizes may choose other experts in a mixture. Returns their number. Raises SelfTestFailed."""
    decoder = model.decoder
    assert decoder.graphs is not None
    rows = _Rows(model, runner, config)
    with _Stage("graphs", rows.device), closing(rows):
        decoder.graphs.record_all()
        for size in decoder.graphs.sizes:
            for chunks in rows.steps(size):
                decoder.line_up(chunks)
                expected = decoder.compute(size, size, max(_PROMPT_TOKENS))[: len(chunks)]
                rows.spoil(chunks)
                found = decoder.replay(size)[: len(chunks)]
                rows.compare("a graph's replay", found, expected)
    return len(decoder.graphs.sizes)


class _Rows:
    """Steps of two prompts, whose tokens are in the cache."""

    def __init__(self, model: AheadRunner, runner: ModelRunner, config: PretrainedConfig) -> None:
        self._model, self._runner = model, runner
        self.device = model.state.device
        prompts = [probe_ids(config, n, self.device) for n in _PROMPT_TOKENS]
        self._sequences = probe_sequences(prompts, runner.block_size)[: model.state.num_rows]
        runner.logits([Chunk(s, 0, s.num_prompt, samples=False) for s in self._sequences])
        for sequence in self._sequences:
            model.state.admit(sequence, self._sequences)
            model.state.cover(sequence)
            model.state.place(sequence, sequence.token_ids[-1], sequence.num_prompt - 1)

    def steps(self, most: int = 4) -> list[list[Chunk]]:
        """Steps with at most `most` tokens: the last tokens together and alone, so that a replay
        cannot repeat what it read before; and the end of a prompt, beside the other's last one."""
        first, *other = (Chunk(s, s.num_prompt - 1, 1, samples=True) for s in self._sequences)
        end = Chunk(first.sequence, first.start - 2, 3, samples=True)
        steps = [[*other, first], [first], [*other], [end, *other]]
        return [step for step in steps if 0 < sum(c.num_tokens for c in step) <= most]

    def spoil(self, chunks: Seq[Chunk], value: float = float("nan")) -> None:
        """Overwrites the KV of these tokens: a step must write it before it reads it."""
        size = self._runner.block_size
        slots = [
            chunk.sequence.block_ids[at // size] * size + at % size
            for chunk in chunks
            for at in range(chunk.start, chunk.start + chunk.num_tokens)
        ]
        for layer in self._runner.cache.layers.values():
            layer.key_slots[slots] = layer.value_slots[slots] = value

    def close(self) -> None:
        """Frees all that it holds, even after a failure."""
        self.spoil([Chunk(s, 0, s.num_prompt, samples=False) for s in self._sequences], 0.0)
        self._model.decoder.line_up([])

    def compare(self, stage: str, found: Tensor, expected: Tensor) -> None:
        """Raises SelfTestFailed."""
        if reason := logits_difference(found.float(), expected.float(), self._runner.cache.dtype):
            raise SelfTestFailed(stage, reason)


class _Stage:
    """Turns what a stage raises into SelfTestFailed. Raises ModelRefused if the device is lost,
    since nothing can run on it in this process."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, Exception) and self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as lost:
                raise ModelRefused(
                    f"the GPU failed in the self-test ({self._name}): {first_line(lost)}; "
                    "--attention torch goes without Triton's kernels"
                ) from exc
        if isinstance(exc, Exception) and not isinstance(exc, SelfTestFailed):
            reason = f"it raises {type(exc).__name__}: {first_line(exc)}"
            raise SelfTestFailed(self._name, reason) from exc


def choose_steps(
    paged: ModelRunner, backend: Backend, loaded: Loaded, progress: Callable[[str], None]
) -> ModelRunner | AheadRunner:
    """Returns a runner that passed its self-test. What fails is left out, with a line in the log.
    Raises SelfTestFailed if steps ahead were asked for and fail."""
    asked = loaded.options.ahead
    if not (backend.for_gpu if asked is None else asked):
        return paged

    def ahead(record: Record | None = None) -> AheadRunner:
        max_num_seqs = loaded.options.num_places
        return AheadRunner(paged, backend.prepare_rows, max_num_seqs, loaded.device, record)

    try:
        check_rows(ahead(), paged, loaded.config)
    except SelfTestFailed as exc:
        if asked:
            raise
        log.warning("no step runs ahead: %s", exc)
        return paged
    record = recorder(loaded.device)
    if record is None:
        return ahead()
    model = ahead(record)
    try:
        progress(f"{check_graphs(model, paged, loaded.config)} CUDA graphs are recorded")
    except SelfTestFailed as exc:
        log.warning("steps are ahead without graphs: %s", exc)
        return ahead()
    return model
