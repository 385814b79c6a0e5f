"""Calls the CPU kernels on tensors; shapes and types are checked only here.

Weights are laid out in panels of 64 outputs, which linear.h and widen.h read. Attention reads the
cache in place, without gather or mask; layers that its kernel does not support (odd head sizes) use
packed attention.
"""

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, PreparedAttention, RowSpan
from workers.model.attention.packed import PackedAttention
from workers.model.quantization import QuantizedWeight
from workers.model.sampler import argmax

PANEL = 64  # outputs computed at once
_HALF = PANEL // 2

Weight = Tensor | QuantizedWeight  # (out, in)


@dataclass(frozen=True, slots=True)
class Panels:
    """weights (num_panels, in, 64) in the product's type, or int8 with scales float32 (num_panels *
    64,)."""

    weights: Tensor
    scales: Tensor | None = None


def lay_out(weight: Weight, *, for_lookup: bool) -> Panels:
    """In a panel the weights of an input (in bfloat16: of a pair of inputs) are contiguous; the
    last panel is padded with zeros. for_lookup: order int8 weights for a library that
    `looks_up_bytes`."""
    num_inputs = 2 if weight.dtype == torch.bfloat16 else 1
    if not isinstance(weight, QuantizedWeight):
        return Panels(_panels(_filled(weight, PANEL), num_inputs))
    values, scales = _filled(weight.values, PANEL), _filled(weight.scales, PANEL)
    if num_inputs == 1:
        return Panels(_panels(values, 1), scales)
    if not for_lookup:
        return Panels(_panels(values, 2), scales)
    panels = _panels(_with_signs(values), 2)
    # Alternate 8 of one block of 32 with 8 of the next: the order of unpacklo and unpackhi.
    in_turns = panels.view(-1, 2, 4, 8).transpose(1, 2).contiguous()
    return Panels(in_turns.view(panels.shape), scales)


def lay_out_gated(gate: Weight, up: Weight, *, for_lookup: bool) -> Panels:
    """gate and up (out, in) -> panels that hold 32 outputs of gate and the same 32 of up."""
    if not isinstance(gate, QuantizedWeight):
        assert not isinstance(up, QuantizedWeight)
        return lay_out(_in_halves(gate, up), for_lookup=for_lookup)
    assert isinstance(up, QuantizedWeight)
    values = _in_halves(gate.values, up.values)
    scales = _in_halves(gate.scales, up.scales)
    return lay_out(QuantizedWeight(values, scales, gate.dtype), for_lookup=for_lookup)


def _filled(weight: Tensor, multiple: int) -> Tensor:
    """Pads the outputs with zeros to a multiple."""
    beside = (0, 0) * (weight.ndim - 1)
    return F.pad(weight, (*beside, 0, -len(weight) % multiple))


def _in_halves(gate: Tensor, up: Tensor) -> Tensor:
    """Interleaves gate and up in blocks of 32 outputs."""
    halves = [_filled(part, _HALF).view(-1, _HALF, *part.shape[1:]) for part in (gate, up)]
    return torch.cat(halves, dim=1).flatten(0, 1)


def _panels(weight: Tensor, num_inputs: int) -> Tensor:
    """(out, in) -> (num_panels, in, 64), of `num_inputs` inputs side by side."""
    num_in = weight.shape[1]
    panels = weight.view(-1, PANEL, num_in // num_inputs, num_inputs).transpose(1, 2)
    return panels.contiguous().view(-1, num_in, PANEL)


def _with_signs(values: Tensor) -> Tensor:
    """-127 … 127 -> magnitude in seven bits, sign in the eighth."""
    magnitudes = values.abs().view(torch.uint8)
    return (magnitudes | (values < 0).to(torch.uint8) << 7).view(torch.int8)


VECTOR = 16  # floats; sizes must be multiples on every processor
MAX_HEAD_DIM = 256
MAX_GROUP = 64  # query heads of one KV head
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The calls of one library for one element type."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        name = DTYPES[dtype]
        self.dtype = dtype
        self._attend = getattr(library, f"attend_{name}")
        self._rms_norm = getattr(library, f"rms_norm_{name}")
        self._rotate_and_keep = getattr(library, f"rotate_and_keep_{name}")
        self._silu_gate = getattr(library, f"silu_gate_{name}")
        self._argmax = getattr(library, f"argmax_{name}")
        self._linear = getattr(library, f"linear_{name}")
        self._run_layers = getattr(library, f"run_layers_{name}")
        self._looks_up_bytes = bool(library.looks_up_bytes())
        library.set_num_threads(torch.get_num_threads())

    def attend(
        self,
        tiles: Tensor,
        slots: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        flags: AttentionFlags,
    ) -> Tensor:
        """Attention of tiles of queries through the cache -> (T, num_heads, v_dim).

        tiles int64 (num_tiles, 4): first query row, number of queries, position of the first, and
        the start of the sequence in `slots` (int64). query (T, num_heads, k_dim) with contiguous
        heads, keys (num_slots, kv_heads, k_dim), values (…, v_dim).
        """
        num_tokens, num_heads, k_dim = query.shape
        kv_heads, v_dim = values.shape[1:]
        self._check(query, keys, values)
        assert query.stride()[1:] == (k_dim, 1)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        out = query.new_empty(num_tokens, num_heads, v_dim)
        sinks = None if flags.sinks is None else flags.sinks.float().contiguous()
        self._attend(
            tiles.data_ptr(),
            len(tiles),
            slots.data_ptr(),
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            num_heads,
            kv_heads,
            k_dim,
            v_dim,
            flags.scale,
            flags.softcap or 0.0,
            flags.window or 0,
            None if sinks is None else sinks.data_ptr(),
        )
        return out

    def can_turn(self, num_heads: int, kv_heads: int, dim: int) -> bool:
        return dim % (2 * VECTOR) == 0 and can_attend(num_heads, kv_heads, dim, dim)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (…, dim), weight (dim,) -> x / rms(x) * weight."""
        x = x.contiguous()
        self._check(x, weight)
        assert weight.shape == x.shape[-1:]  # FalconMamba has norms that ignore their weights
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // dim,
            dim,
            eps,
        )
        return out

    def rotate_and_keep(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        num_tokens, kv_heads, dim = len(qkv), *keys.shape[1:]
        self._check(qkv, cos, sin, keys, values)
        assert qkv.is_contiguous()
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        self._rotate_and_keep(
            qkv.data_ptr(),
            num_tokens,
            num_heads,
            kv_heads,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
        )

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """gate_up (T, 2 * dim) -> silu(gate) * up (T, dim)."""
        self._check(gate_up)
        assert gate_up.is_contiguous()
        num_tokens, both = gate_up.shape
        out = gate_up.new_empty(num_tokens, both // 2)
        self._silu_gate(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_tokens,
            both // 2,
        )
        return out

    def can_multiply(self, weight: Weight) -> bool:
        """Whether `linear` takes such weights (out, in)."""
        num_out, num_in = weight.shape
        return weight.dtype == self.dtype and self.can_multiply_shape(num_in, num_out)

    def can_multiply_shape(self, num_in: int, num_out: int) -> bool:
        """Whether `linear` takes weights of this shape and of its type."""
        return num_in % VECTOR == 0 and num_out % VECTOR == 0

    def lay_out(self, weight: Weight) -> Panels:
        """Converts weight (out, in) to the layout of `linear`."""
        return lay_out(weight, for_lookup=self._looks_up_bytes)

    def lay_out_gated(self, gate: Weight, up: Weight) -> Panels:
        """Converts gate and up (out, in) to the layout of `linear` with is_gated."""
        return lay_out_gated(gate, up, for_lookup=self._looks_up_bytes)

    def linear(
        self,
        x: Tensor,
        panels: Panels,
        num_out: int,
        to: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """x (T, in), panels of `lay_out`, to (T, out) -> x @ weight.T, added to `to`.

        norm: weights (in,) and eps of an RMSNorm applied to x first. is_gated, with panels of
        `lay_out_gated`: silu(x @ gate.T) * (x @ up.T).
        """
        weight, eps = norm or (None, 0.0)
        self._check(*(part for part in (x, to, weight) if part is not None))
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens, num_in = x.shape
        assert num_in == panels.weights.shape[1]
        assert weight is None or weight.shape == (num_in,)
        assert panels.weights.dtype == (self.dtype if panels.scales is None else torch.int8)
        assert to is None or (to.shape == (num_tokens, num_out) and to.is_contiguous())
        out = x.new_empty(num_tokens, num_out)
        normed = None if weight is None else x.new_empty(num_tokens, num_in)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            panels.weights.data_ptr(),
            None if panels.scales is None else panels.scales.data_ptr(),
            None if to is None else to.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_in,
            num_out,
            is_gated,
            None if weight is None else weight.data_ptr(),
            eps,
            None if normed is None else normed.data_ptr(),
        )
        return out

    def run_layers(
        self,
        layers: ctypes.Array[Any],
        num_layers: int,
        sizes: ctypes.Structure,
        step: ctypes.Structure,
    ) -> None:
        """See NativeLayers, which defines the structs."""
        self._run_layers(layers, num_layers, ctypes.byref(sizes), ctypes.byref(step))

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype != self.dtype or not logits.is_contiguous():
            return argmax(logits)
        num_rows, vocab_size = logits.shape
        out = torch.empty(num_rows, dtype=torch.int64)
        self._argmax(
            logits.data_ptr(),
            out.data_ptr(),
            num_rows,
            vocab_size,
        )
        return out

    def _check(self, *tensors: Tensor) -> None:
        assert all(tensor.dtype == self.dtype for tensor in tensors)


def can_attend(num_heads: int, kv_heads: int, k_dim: int, v_dim: int) -> bool:
    """Whether the attention kernel takes heads of these sizes."""
    return (
        num_heads % kv_heads == 0
        and num_heads // kv_heads <= MAX_GROUP
        and all(dim % VECTOR == 0 and dim <= MAX_HEAD_DIM for dim in (k_dim, v_dim))
    )


_Column = npt.NDArray[np.int64]

_ROWS = 64  # query rows in a tile: queries times heads of a group


class NativeAttention:
    """AttentionBackend for a CPU, in one element type."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, spans: Seq[RowSpan], device: torch.device) -> "PreparedNative":
        return PreparedNative(self._kernels, spans)


class PreparedNative:
    """A step's work as tiles for the kernel; a tile is some queries of one sequence."""

    def __init__(self, kernels: Kernels, spans: Seq[RowSpan]) -> None:
        self._kernels = kernels
        self._spans = spans
        self.slots = torch.from_numpy(np.concatenate([span.slots for span in spans]))
        # (4, num_spans): first row, number of rows, first position, start in the slots.
        lengths = [len(span.slots) for span in spans]
        begins = accumulate(lengths[:-1], initial=0)
        parts = [(span.first, span.num_tokens, span.start) for span in spans]
        self._parts = np.array(
            [(*part, begin) for part, begin in zip(parts, begins, strict=True)], dtype=np.int64
        ).T
        self._tiles: dict[int, Tensor] = {}
        self._packed: PreparedAttention | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        num_heads, k_dim = query.shape[1:]
        kv_heads, v_dim = values.shape[1:]
        if not can_attend(num_heads, kv_heads, k_dim, v_dim):
            if self._packed is None:
                self._packed = PackedAttention().prepare(self._spans, query.device)
            return self._packed.attend(query, keys, values, flags)
        if query.stride()[1:] != (k_dim, 1):
            query = query.contiguous()
        tiles = self.tiles(num_heads // kv_heads)
        return self._kernels.attend(tiles, self.slots, query, keys, values, flags)

    def tiles(self, group: int) -> Tensor:
        """Tiles of all rows, int64 (num_tiles, 4), for `group` query heads per KV head; see
        Kernels.attend. The longest come first, so that no thread starts one last."""
        num_queries = max(1, _ROWS // group)
        if num_queries not in self._tiles:
            counts = -(-self._parts[1] // num_queries)  # of tiles in each span
            first, rows, start, begin = np.repeat(self._parts, counts, axis=1)
            number = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
            skipped = number * num_queries
            rows = np.minimum(num_queries, rows - skipped)
            self._tiles[num_queries] = _ordered(first + skipped, rows, start + skipped, begin)
        return self._tiles[num_queries]

    def tiles_of_rows(self, wanted: Tensor, group: int) -> Tensor:
        """Tiles of rows `wanted` int64 (num_wanted,); includes other rows if there are more wanted
        rows than spans."""
        if len(wanted) > self._parts.shape[1]:
            return self.tiles(group)
        first, _, start, begin = self._parts
        rows = wanted.numpy()
        span = np.searchsorted(first, rows, side="right") - 1
        ones = np.ones_like(rows)
        return _ordered(rows, ones, start[span] + rows - first[span], begin[span])


def _ordered(first: _Column, rows: _Column, position: _Column, begin: _Column) -> Tensor:
    tiles = np.stack([first, rows, position, begin], axis=1)
    order = np.argsort(-rows * (position + rows), kind="stable")
    return torch.from_numpy(np.ascontiguousarray(tiles[order]))
