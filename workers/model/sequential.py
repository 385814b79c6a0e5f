"""Runs a decoder that cannot share a batch: one sequence per forward, each with its own state.

The state is what transformers keeps for the family: keys and values, convolutions, recurrent
matrices. The engine's blocks are only counted, for admission. If a state does not match the
engine's count of computed tokens (rollback, preemption, shared prefix), the sequence is recomputed
from its start.

At loading, the family's forward over a whole sequence without state is the reference: if continuing
inside a prompt gives other results, only single tokens continue; if that fails too, nothing does.
"""

import inspect
import math
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from workers.engine.interface import Chunk, ModelRefused, Padding, Row
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.model.attention.interface import CannotShareBatch
from workers.model.checkpoint import first_line
from workers.model.probe import (
    LOWEST_COSINE,
    centred,
    own_attention_of,
    probe_ids,
    probe_sequence,
    probe_sequences,
)
from workers.model.runner import ModelRunner, answer_chunks, scored_positions
from workers.model.transformers_compat import STATE_NAMES


class Continues(StrEnum):
    """Where a family's forward can continue from an earlier state."""

    ANYWHERE = "prompts are computed in chunks"
    AT_TOKENS = "each prompt is computed in one piece, with its last chunk"
    NEVER = "each token is computed from the start of its sequence, which is slow"


@dataclass(slots=True)
class _State:
    """A sequence's state. `cache` holds `num_held` tokens; the engine counts `num_counted` as
    computed, and may have postponed the last of them."""

    cache: Any = None
    num_held: int = 0
    num_counted: int = 0


@dataclass(eq=False)
class SequentialRunner:
    """A Hugging Face decoder that computes each sequence alone. Implements the engine's Model."""

    shares_blocks = False
    num_state_slots = 0

    _decoder: nn.Module
    continues: Continues
    _: KW_ONLY
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    device: torch.device

    def __post_init__(self) -> None:
        self._argument_names = frozenset(inspect.signature(self._decoder.forward).parameters)
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()

    @property
    def num_states(self) -> int:
        """Sequences that have a state now."""
        return len(self._states)

    @torch.inference_mode()
    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        """See Model.run. Ignores padding."""
        self._forget_rolled_back()
        found = [self._compute(chunk) for chunk in chunks]
        logits = _stack([rows for rows, _ in found])
        return answer_chunks(logits, chunks, [scored for _, scored in found], masks=masks)

    @torch.inference_mode()
    def logits(self, chunks: Seq[Chunk]) -> Tensor:
        """Logits (num_rows, vocab_size) of each chunk's scored positions, then of its last one if
        it samples."""
        self._forget_rolled_back()
        return _stack([self._compute(chunk)[0] for chunk in chunks])

    def _forget_rolled_back(self) -> None:
        """Drops states of preempted sequences, including those without a chunk now."""
        for sequence, state in list(self._states.items()):
            if state.num_counted != sequence.num_computed:
                del self._states[sequence]

    def _compute(self, chunk: Chunk) -> tuple[Tensor | None, range]:
        """Logits (num_rows, vocab_size) of the scored positions, then of the last one if the chunk
        samples; and the scored positions."""
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        state = self._states.get(sequence, _State())
        if state.num_counted != chunk.start:
            state = _State()
        self._states[sequence] = state
        state.num_counted = end
        if self.continues is not Continues.ANYWHERE and not chunk.samples:
            return None, range(0)  # postponed until a chunk samples
        is_token = end - state.num_held == 1
        if self.continues is Continues.AT_TOKENS and not is_token:
            state.cache, state.num_held = None, 0
        scored = scored_positions(sequence, state.num_held, end)
        rows = [*scored, *([end - 1] if chunk.samples else [])]
        return self._forward(sequence.token_ids, state, end, rows), scored

    def _forward(self, token_ids: list[int], state: _State, end: int, rows: list[int]) -> Tensor:
        """Advances the state from `num_held` tokens to `end` -> (len(rows), vocab_size) logits."""
        start = state.num_held
        index = torch.tensor([row - start for row in rows], dtype=torch.int64, device=self.device)
        arguments = self._arguments(state, start, end, index)
        output = self._decoder(
            input_ids=torch.tensor([token_ids[start:end]], device=self.device),
            use_cache=self.continues is not Continues.NEVER,
            **arguments,
        )
        if self.continues is not Continues.NEVER:
            state.cache = kept_state(output)
            state.num_held = end
        logits: Tensor = output.logits[0]
        return logits if "logits_to_keep" in arguments else logits[index]

    def _arguments(self, state: _State, start: int, end: int, index: Tensor) -> dict[str, Any]:
        """The family's arguments for the position and the wanted logits."""
        arguments: dict[str, Any] = {
            "position_ids": torch.arange(start, end, device=self.device)[None],
            "logits_to_keep": index,
        }
        if state.cache is not None:
            arguments |= dict.fromkeys(STATE_NAMES, state.cache)
        return {name: value for name, value in arguments.items() if name in self._argument_names}


def _stack(rows: list[Tensor | None]) -> Tensor:
    """Concatenates all rows (n, vocab_size)."""
    found = [part for part in rows if part is not None]
    return torch.cat(found) if found else torch.empty(0, 0)


def kept_state(output: Any) -> Any:
    """The state returned by a forward with `use_cache`. Raises LookupError without one."""
    for name in STATE_NAMES:
        if (state := output.get(name)) is not None:
            return state
    raise LookupError("the forward hands on no state")


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state: a cache object, or lists of tensors."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(state_bytes, state.values()))
    if isinstance(state, list | tuple):
        return sum(map(state_bytes, state))
    if type(state).__module__.startswith("transformers."):
        return state_bytes(vars(state))
    return 0


# Ends of the two probes' chunks: prompts of 11 tokens in three chunks and in one, then tokens.
_PROBE_ENDS = ((4, 9, 11, 12, 13, 14, 15, 16), (11, 12, 13))
_NUM_PROMPT = 11
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
    prompts = _probes(config, device)
    try:
        expected = _whole(decoder, prompts)
    except Exception as exc:
        raise ModelRefused(f"{name} does not run on plain tokens: {first_line(exc)}") from exc
    bound, rounding = 1.0 - LOWEST_COSINE[decoder.dtype], _ROUNDING[decoder.dtype]
    if not _error(decoder, Continues.NEVER, prompts, expected, device) <= bound:
        raise ModelRefused(
            f"{name} gives a token other logits when more tokens follow it, or at positions from "
            "0 on, so it is no decoder that can be run token by token"
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


@torch.inference_mode()
def check_states(
    decoder: Any, runner: ModelRunner, config: PretrainedConfig, device: torch.device
) -> None:
    """Lets the mixers of a paged runner take chunks if that gives the results of whole prompts,
    else single tokens. Raises CannotShareBatch if both give others."""
    assert runner.states is not None
    prompts = _probes(config, device)
    with own_attention_of(decoder):
        expected = _whole(decoder, prompts)
    for takes_chunks in (True, False):
        runner.states.takes_chunks = takes_chunks
        sequences = probe_sequences(prompts, runner.block_size)
        error = _largest_error(runner, sequences, prompts, expected)
        if error <= _ROUNDING[decoder.dtype]:
            return
    raise CannotShareBatch(
        f"{type(decoder).__name__} continues from its states with other results (1 - cosine "
        f"{error:.1g})"
    )


def _probes(config: PretrainedConfig, device: torch.device) -> list[Tensor]:
    return [probe_ids(config, ends[-1], device) for ends in _PROBE_ENDS]


def _whole(decoder: Any, prompts: list[Tensor]) -> list[Tensor]:
    """Logits (num_tokens, vocab_size) of whole prompts."""
    return [decoder(input_ids=ids, use_cache=False).logits[0].float() for ids in prompts]


def _error(
    decoder: Any,
    continues: Continues,
    prompts: list[Tensor],
    expected: list[Tensor],
    device: torch.device,
) -> float:
    """`_largest_error` of a runner that continues like this."""
    runner = SequentialRunner(
        decoder,
        continues,
        num_blocks=1,
        block_size=1,
        eos_token_ids=frozenset(),
        max_model_len=max(prompt.shape[1] for prompt in prompts),
        device=device,
    )
    sequences = [probe_sequence([], prompt.shape[1]) for prompt in prompts]
    return _largest_error(runner, sequences, prompts, expected)


def _largest_error(
    runner: ModelRunner | SequentialRunner,
    sequences: list[Sequence],
    prompts: list[Tensor],
    expected: list[Tensor],
) -> float:
    """Largest 1 - cosine over samples of two sequences beside each other; inf if it raises."""
    worst = 0.0
    try:
        for ends in zip_longest(*_PROBE_ENDS):
            chunks, wanted = [], []
            for number, end in enumerate(ends):
                if end is not None:
                    chunks.append(_next_chunk(sequences[number], prompts[number], end))
                    wanted += [expected[number][end - 1]] if chunks[-1].samples else []
            found = runner.logits(chunks)
            for chunk in chunks:
                chunk.sequence.num_computed = chunk.start + chunk.num_tokens
            worst = max([worst, *map(_distance, found, wanted)])
    except Exception:  # whatever it raises, it cannot continue
        return float("inf")
    return worst


def _next_chunk(sequence: Sequence, prompt: Tensor, end: int) -> Chunk:
    """The chunk up to `end`, which samples from the prompt's last one on."""
    sequence.token_ids[:] = prompt[0, : max(end, _NUM_PROMPT)].tolist()
    start = sequence.num_computed
    return Chunk(sequence, start, end - start, samples=end >= _NUM_PROMPT)


def _distance(found: Tensor, expected: Tensor) -> float:
    """1 - cosine of logits (vocab_size,), mean removed; inf if not finite."""
    cosine = torch.cosine_similarity(centred(found.double()), centred(expected.double()), dim=-1)
    distance = 1.0 - float(cosine)
    return distance if math.isfinite(distance) else float("inf")
