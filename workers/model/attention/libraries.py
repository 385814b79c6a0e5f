"""Paged attention by other libraries: FlashAttention-3 through torch, and FlashInfer.

Off by default and not measured. Both support causal attention with windows and equal key and value
sizes; FlashInfer also softcaps. Other layers use packed attention. Tests replace the kernels by
stand-ins with the documented interface.
"""

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engine.model import ModelRefused
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionFlags,
    PreparedAttention,
    Span,
)
from workers.model.attention.packed import PackedAttention

_WORKSPACE_BYTES = 128 * 2**20  # recommended by FlashInfer's documentation


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One step's spans as int32 tensors: first rows of the n queries and their end (n + 1,),
    context lengths (n,), block tables (n, blocks) padded with 0."""

    query_firsts: Tensor
    lengths: Tensor
    tables: Tensor
    num_blocks: Tensor  # (n,), of each table
    most_queries: int
    longest: int


def lay_out_spans(spans: Seq[Span], block_size: int, device: torch.device) -> PagedLayout:
    """Spans follow each other without gaps."""
    firsts = np.array([0, *np.cumsum([span.num_tokens for span in spans])], dtype=np.int32)
    lengths = np.array([len(span.slots) for span in spans], dtype=np.int32)
    num_blocks = -(-lengths // block_size)
    tables = np.zeros((len(spans), int(num_blocks.max())), dtype=np.int32)
    for row, span in enumerate(spans):
        tables[row, : num_blocks[row]] = span.slots[::block_size] // block_size
    return PagedLayout(
        torch.from_numpy(firsts).to(device),
        torch.from_numpy(lengths).to(device),
        torch.from_numpy(tables).to(device),
        torch.from_numpy(num_blocks).to(device),
        most_queries=max(span.num_tokens for span in spans),
        longest=int(lengths.max()),
    )


class LibraryAttention:
    """AttentionBackend that uses a library for the layers it supports."""

    def __init__(self, block_size: int, library: "Library") -> None:
        self._block_size = block_size
        self._library = library

    def prepare(self, spans: Seq[Span], device: torch.device) -> "_PreparedLibrary":
        return _PreparedLibrary(self._library, spans, self._block_size, device)


class _PreparedLibrary:
    def __init__(
        self, library: "Library", spans: Seq[Span], block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._packed = PackedAttention()
        self._spans, self._device = spans, device
        self._fallback: PreparedAttention | None = None
        self._library = library
        self._layout = lay_out_spans(spans, block_size, device)
        self._plans: dict[Any, Any] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        if not self._library.takes(query, values, flags):
            if self._fallback is None:
                self._fallback = self._packed.prepare(self._spans, self._device)
            return self._fallback.attend(query, keys, values, flags)
        pages = (-1, self._block_size, keys.shape[1], keys.shape[2])
        return self._library.attend(
            self._layout, query, keys.view(pages), values.view(pages), flags, self._plans
        )


class FlashAttention:
    """torch.nn.attention.varlen with block tables; runs the activated kernel."""

    def __init__(self, varlen_attention: Callable[..., Any]) -> None:
        self._varlen_attention = varlen_attention

    def takes(self, query: Tensor, values: Tensor, flags: AttentionFlags) -> bool:
        is_plain = flags.softcap is None and flags.sinks is None
        return is_plain and query.shape[2] == values.shape[2] and query.dtype.itemsize == 2

    def attend(
        self,
        layout: PagedLayout,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        flags: AttentionFlags,
        plans: dict[Any, Any],
    ) -> Tensor:
        """keys and values (num_blocks, block_size, kv_heads, dim) -> (T, num_heads, dim)."""
        found: Tensor = self._varlen_attention(
            query.contiguous(),
            keys,
            values,
            layout.query_firsts,
            None,
            layout.most_queries,
            layout.longest,
            scale=flags.scale,
            window_size=(-1 if flags.window is None else flags.window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=layout.lengths,
            block_table=layout.tables,
            num_splits=1,  # other values make a row depend on its neighbours
        )
        return found


class FlashInfer:
    """FlashInfer's paged prefill wrapper, planned on the host for each kind of layer."""

    def __init__(self, make_wrapper: Callable[[], Any]) -> None:
        self._make_wrapper = make_wrapper
        self._wrappers: list[Any] = []

    def takes(self, query: Tensor, values: Tensor, flags: AttentionFlags) -> bool:
        is_plain = flags.sinks is None and query.shape[2] == values.shape[2]
        return is_plain and query.shape[2] in (64, 128, 256) and query.dtype.itemsize == 2

    def attend(
        self,
        layout: PagedLayout,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        flags: AttentionFlags,
        plans: dict[Any, Any],
    ) -> Tensor:
        """See FlashAttention.attend. Layers with the same options share a plan."""
        num_heads, dim = query.shape[1:]
        key = (flags.window, flags.softcap, flags.scale, num_heads, keys.shape[2], dim)
        if key not in plans:
            plans[key] = self._wrapper(len(plans))
            self._plan(plans[key], layout, query, keys, flags)
        found: Tensor = plans[key].run(query.contiguous(), (keys, values))
        return found

    def _wrapper(self, number: int) -> Any:
        if number == len(self._wrappers):
            self._wrappers.append(self._make_wrapper())
        return self._wrappers[number]

    def _plan(
        self, wrapper: Any, layout: PagedLayout, query: Tensor, keys: Tensor, flags: AttentionFlags
    ) -> None:
        block_size = keys.shape[1]
        firsts = torch.nn.functional.pad(layout.num_blocks.cumsum(0, dtype=torch.int32), (1, 0))
        width = torch.arange(layout.tables.shape[1], device=query.device)
        wrapper.plan(
            layout.query_firsts,
            firsts,
            layout.tables[width < layout.num_blocks[:, None]],
            (layout.lengths - 1) % block_size + 1,
            query.shape[1],
            keys.shape[2],
            query.shape[2],
            block_size,
            causal=True,
            sm_scale=flags.scale,
            window_left=-1 if flags.window is None else flags.window - 1,
            logits_soft_cap=flags.softcap or 0.0,
            q_data_type=query.dtype,
        )


Library = FlashAttention | FlashInfer


def load_flash_attention(block_size: int) -> AttentionBackend:
    """FlashAttention-3 through torch. Raises ModelRefused where either is missing."""
    try:
        from torch.nn.attention import activate_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as exc:
        raise ModelRefused("attention fa3 needs a torch with paged varlen attention") from exc
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise ModelRefused("attention fa3 needs a torch with paged varlen attention")
    try:
        activate_flash_attention_impl("FA3")
    except Exception as exc:  # its import may raise anything
        raise ModelRefused("attention fa3 is asked for, but FlashAttention-3 is missing") from exc
    return LibraryAttention(block_size, FlashAttention(varlen_attn))


def load_flashinfer(block_size: int, device: torch.device) -> AttentionBackend:
    """FlashInfer. Raises ModelRefused where it is missing."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as exc:
        raise ModelRefused("attention flashinfer is asked for, but it is not installed") from exc
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def make_wrapper() -> Any:
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    return LibraryAttention(block_size, FlashInfer(make_wrapper))
