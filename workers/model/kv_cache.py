"""The KV cache's tensors: one K and one V tensor per attention layer, or per group of layers that
share them, divided into blocks.

Tensors of one shape lie in one storage, so that blocks are copied in all layers at once. The engine
decides which sequence owns a block.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.attention.interface import (
    AttentionCall,
    AttentionFlags,
    LayerShape,
    PreparedAttention,
)
from workers.model.native.kernels import Kernels


@dataclass(frozen=True, slots=True)
class LayerCache:
    """keys (num_blocks + 1, block_size, kv_heads, k_dim), values (…, v_dim)."""

    shape: LayerShape
    keys: Tensor
    values: Tensor

    @property
    def key_slots(self) -> Tensor:
        """(num_slots, kv_heads, k_dim): slot = block * block_size + offset."""
        return self.keys.view(-1, *self.keys.shape[2:])

    @property
    def value_slots(self) -> Tensor:
        """(num_slots, kv_heads, v_dim)."""
        return self.values.view(-1, *self.values.shape[2:])


class KVCache:
    """The cache of all layers, by attention module. Has one extra block for padding's KV."""

    def __init__(
        self,
        shapes: Mapping[nn.Module, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.dtype, self._device = dtype, device
        self.layers: dict[nn.Module, LayerCache] = {}
        self._allot(shapes, num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Replaces the cache by one of `num_blocks` empty blocks; the old ones are freed first."""
        shapes = {module: layer.shape for module, layer in self.layers.items()}
        self.storages.clear()
        self.layers.clear()
        self._allot(shapes, num_blocks)

    def _allot(self, shapes: Mapping[nn.Module, LayerShape], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        sizes = Counter(size for shape in _kept(shapes.values()) for size in shape.kv_sizes)
        # (parts, num_blocks + 1, block_size, kv_heads, dim), by (kv_heads, dim). Uninitialised: the
        # system provides pages on the first write.
        self.storages = {
            size: torch.empty(
                num_parts,
                num_blocks + 1,
                self.block_size,
                *size,
                dtype=self.dtype,
                device=self._device,
            )
            for size, num_parts in sizes.items()
        }
        for storage in self.storages.values():
            # Padding reads the scratch block before writing it; it must contain numbers.
            storage[:, num_blocks:].zero_()
        parts = {size: iter(storage) for size, storage in self.storages.items()}
        kept: dict[Any, tuple[Tensor, Tensor]] = {}
        for module, shape in shapes.items():
            group = module if shape.kv_group is None else shape.kv_group
            if group not in kept:
                keys, values = (next(parts[size]) for size in shape.kv_sizes)
                kept[group] = keys, values
            self.layers[module] = LayerCache(shape, *kept[group])

    @property
    def scratch_block_id(self) -> int:
        return self.num_blocks

    @property
    def tensors(self) -> list[Tensor]:
        return [part for layer in self.layers.values() for part in (layer.keys, layer.values)]

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages.values())

    def copy_blocks(self, source_ids: Seq[int], target_ids: Seq[int]) -> None:
        """Copies whole blocks in all layers; reads all sources before writing."""
        ids = torch.tensor([source_ids, target_ids], device=self._device)
        for storage in self.storages.values():
            storage.index_copy_(1, ids[1], storage.index_select(1, ids[0]))


def token_bytes(shapes: Iterable[LayerShape], dtype: torch.dtype) -> int:
    return sum(s.kv_heads * (s.k_dim + s.v_dim) for s in _kept(shapes)) * dtype.itemsize


def _kept(shapes: Iterable[LayerShape]) -> Iterator[LayerShape]:
    """One layer of each group, and those without a group."""
    groups: set[int | None] = {None}
    for shape in shapes:
        if shape.kv_group is None or shape.kv_group not in groups:
            yield shape
        groups.add(shape.kv_group)


class PagedStep:
    """AttentionStep that writes the step's KV to the cache and attends through it."""

    def __init__(
        self,
        cache: KVCache,
        prepared: PreparedAttention,
        slot_mapping: Tensor,
        kernels: Kernels | None = None,
    ) -> None:
        """`slot_mapping` (T,): the cache slot of each flat token."""
        self._layers = cache.layers
        self.slot_mapping = slot_mapping
        self._kernels = kernels
        self.prepared = prepared

    def attend(self, call: AttentionCall) -> Tensor:
        layer = self._layers[call.module]
        keys, values = layer.key_slots, layer.value_slots
        keys.index_copy_(0, self.slot_mapping, call.key.to(keys.dtype))
        values.index_copy_(0, self.slot_mapping, call.value.to(values.dtype))
        return self.prepared.attend(call.query, keys, values, call.flags)

    def turn_and_attend(
        self,
        module: nn.Module,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        flags: AttentionFlags,
    ) -> Tensor:
        """Applies the rotary embedding while writing the cache, then attends.

        qkv (T, (num_heads + 2 * kv_heads) * dim), cos and sin (T, rotary) -> (T, num_heads, dim).
        """
        assert self._kernels is not None
        layer = self._layers[module]
        keys, values = layer.key_slots, layer.value_slots
        self._kernels.rotate_and_keep(
            qkv, num_heads, cos, sin, norms, self.slot_mapping, keys, values
        )
        query = qkv[:, : num_heads * keys.shape[-1]].view(len(qkv), num_heads, -1)
        return self.prepared.attend(query, keys, values, flags)
