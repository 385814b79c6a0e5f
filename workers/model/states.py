"""The states of recurrent and convolution layers, in slots beside the KV cache.

Such a layer's mixer (Mamba, gated delta rule, short convolution) computes with transformers' code.
Its rows of a step are divided: parts of equal length form a batch of their own, with a cache that
shows the slots of their sequences. The engine decides which sequence has which slot.
"""

import inspect
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from workers.engine.interface import Chunk
from workers.engine.sequence import SequenceState
from workers.model.attention.interface import STEP_KEYWORD, RowSpan
from workers.model.transformers_compat import (
    STATE_NAMES,
    cache_of,
    compute_by_rows,
    has_kv,
    has_state,
    states_of,
)


@dataclass(frozen=True, slots=True)
class Mixer:
    """How a module keeps its state: as layer `layer_idx` of the cache that it takes as argument
    `cache_name`. `states`: one sequence's tensors (1, …), by kind and index."""

    layer_idx: int
    cache_name: str
    states: dict[tuple[str, int], Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())


@torch.inference_mode()
def find_mixers(
    decoder: Any, config: PretrainedConfig, input_ids: Tensor
) -> tuple[dict[nn.Module, Mixer], int]:
    """The modules that keep a state of another kind than KV, and the number of layers with KV; no
    modules if there are none, or if this release of transformers keeps their states elsewhere. The
    decoder has transformers' own attention. Raises what its forward raises."""
    name = _cache_name(decoder)
    try:
        cache = _NotingCache(config.get_text_config())
    except Exception:  # a family with a cache of its own
        return {}, 0
    if name is None or not any(map(has_state, cache.layers)):
        return {}, 0
    takers = {module: taken for module in decoder.modules() if (taken := _cache_name(module))}
    handles = [module.register_forward_pre_hook(cache.begin) for module in takers]
    try:
        decoder(input_ids=input_ids, use_cache=True, **{name: cache})
    finally:
        for handle in handles:
            handle.remove()
    mixers = {
        module: Mixer(layer_idx, takers[module], states_of(cache.layers[layer_idx]))
        for module, layer_idx in cache.users.items()
    }
    return mixers, sum(map(has_kv, cache.layers))


def _cache_name(module: nn.Module) -> str | None:
    names = inspect.signature(module.forward).parameters
    return next((name for name in STATE_NAMES if name in names), None)


class _NotingCache(DynamicCache):
    """Notes which module changes the state of which layer: of those that take a cache, the one that
    began last."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        self.users: dict[nn.Module, int] = {}

    def begin(self, module: nn.Module, _: Any) -> None:
        self._begun = module

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **more: Any
    ) -> Tensor:
        self.users[self._begun] = layer_idx
        return super().update_conv_state(conv_states, layer_idx, state_idx, **more)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **more: Any
    ) -> Tensor:
        self.users[self._begun] = layer_idx
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **more)


class _Part(NamedTuple):
    """Rows of one sequence that a mixer computes at once. `order`: its place among those of its
    chunk; `slot` -1: padding, whose state nobody reads; `save_to`: a slot to copy the state to."""

    order: int
    num_tokens: int
    is_new: bool
    slot: int
    first: int
    save_to: int | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts of equal length, as a batch (num_parts, num_tokens). `rows`: their rows in the step;
    `slots`: those of their states, None for padding; `saves` (2, n): slots to copy from and to."""

    num_parts: int
    num_tokens: int
    is_new: bool
    rows: slice | Tensor
    slots: slice | Tensor | None
    saves: Tensor | None


class StateCache:
    """The states of a decoder's mixers, in `num_slots` slots. Between `begin` and `end` the mixers
    compute a step with them. `takes_chunks`: whether they can continue with several tokens."""

    def __init__(
        self, mixers: Mapping[nn.Module, Mixer], num_slots: int, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.takes_chunks = True
        self.batches: list[_Batch] | None = None
        self._device = device
        self._mixers = [_SlottedMixer(self, *each) for each in mixers.items()]
        if device.type == "cpu":
            for module in mixers:
                compute_by_rows(module)

    @property
    def num_bytes(self) -> int:
        return sum(s.nbytes for mixer in self._mixers for s in mixer.storages.values())

    def begin(self, spans: Seq[RowSpan], chunks: Seq[Chunk]) -> None:
        """Copies the states that sequences start from, and divides the step's rows. Spans behind
        those of the chunks are padding."""
        sources: list[tuple[int, int]] = []
        parts: list[_Part] = []
        for span, chunk in zip(spans, chunks, strict=False):
            state = chunk.sequence.state
            assert state is not None
            if state.source is not None and chunk.start == state.source_end:
                sources.append((state.source, state.slot))
            parts += self._parts(span, state)
        for span in spans[len(chunks) :]:
            parts.append(_Part(0, span.num_tokens, True, -1, span.first, None))
        if sources:
            pairs = torch.tensor(sources, device=self._device).T
            for mixer in self._mixers:
                mixer.copy(pairs)
        parts.sort(key=lambda part: part[:5])
        alike = groupby(parts, lambda part: (*part[:3], part.slot < 0))
        self.batches = [self._batch(list(group)) for _, group in alike]

    def end(self) -> None:
        self.batches = None

    def _parts(self, span: RowSpan, state: SequenceState) -> Iterator[_Part]:
        """Cuts a chunk where its state is saved, and into tokens if it must."""
        start, stop, saves = span.start, span.start + span.num_tokens, dict(state.saves)
        ends = {*saves, stop}
        if not self.takes_chunks:
            ends |= set(range(start + 1 if start else min(ends), stop))
        for order, end in enumerate(sorted(ends)):
            first = span.first + start - span.start
            yield _Part(order, end - start, start == 0, state.slot, first, saves.get(end))
            start = end

    def _batch(self, parts: Seq[_Part]) -> _Batch:
        num_tokens = parts[0].num_tokens
        rows = [row for part in parts for row in range(part.first, part.first + num_tokens)]
        slots = [part.slot for part in parts]
        saves = [(part.slot, part.save_to) for part in parts if part.save_to is not None]
        return _Batch(
            len(parts),
            num_tokens,
            parts[0].is_new,
            self._index(rows),
            self._index(slots) if slots[0] >= 0 else None,
            torch.tensor(saves, device=self._device).T if saves else None,
        )

    def _index(self, numbers: list[int]) -> slice | Tensor:
        """A slice if they follow each other, for which nothing is copied."""
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return slice(numbers[0], numbers[0] + len(numbers))
        return torch.tensor(numbers, device=self._device)


class _SlottedMixer:
    """Takes the place of a module's forward, and computes each of a step's batches with the states
    of its sequences."""

    def __init__(self, cache: StateCache, module: nn.Module, mixer: Mixer) -> None:
        self._cache, self._mixer = cache, mixer
        self._forward = module.forward
        module.forward = self.forward
        # Uninitialised: a sequence that starts without a state writes its slot before it reads it.
        self.storages = {
            key: state.new_empty(cache.num_slots, *state.shape[1:])
            for key, state in mixer.states.items()
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """hidden_states (1, T, hidden) -> (1, T, hidden)."""
        if self._cache.batches is None:
            kwargs.pop(STEP_KEYWORD, None)
            return self._forward(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        output = torch.empty_like(hidden)
        for batch in self._cache.batches:
            part = hidden[0, batch.rows].reshape(batch.num_parts, batch.num_tokens, -1)
            states = {key: self._shown(storage, batch) for key, storage in self.storages.items()}
            cache = cache_of(self._mixer.layer_idx, states, is_new=batch.is_new)
            found = self._forward(part, **{self._mixer.cache_name: cache})
            output[0, batch.rows] = found.reshape(-1, found.shape[-1])
            if isinstance(batch.slots, Tensor):
                for key, storage in self.storages.items():
                    storage.index_copy_(0, batch.slots, states[key])
            if batch.saves is not None:
                self.copy(batch.saves)
        return output

    def copy(self, pairs: Tensor) -> None:
        """Copies the states of slots; pairs (2, n): from and to."""
        for storage in self.storages.values():
            storage.index_copy_(0, pairs[1], storage.index_select(0, pairs[0]))

    def _shown(self, storage: Tensor, batch: _Batch) -> Tensor:
        """The batch's states (num_parts, …), which the mixer changes in place."""
        if batch.slots is None:
            return storage.new_zeros(batch.num_parts, *storage.shape[1:])
        return storage[batch.slots]
