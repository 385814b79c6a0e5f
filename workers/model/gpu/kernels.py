"""Calls the Triton kernels on tensors; shapes and types are checked only here.

The same interface as the CPU's `Kernels`.
"""

import torch
import triton
from torch import Tensor

from workers.model.attention.triton_attention import can_attend
from workers.model.gpu.triton_kernels import (
    draw_tiles,
    find_lowest,
    gate_silu,
    join_draws,
    normalise,
    turn_and_keep,
)
from workers.model.kernels import likeliest
from workers.model.sampler import OPEN

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GATE_TILE = 1024
_DRAW_TILE = 4096
_SEARCH_TILE = 8192


class TritonKernels:
    """The calls for one element type, on CUDA tensors, or on any in Triton's interpreter."""

    def __init__(self, dtype: torch.dtype) -> None:
        assert dtype in DTYPES
        self.dtype = dtype

    def can_turn(self, num_heads: int, kv_heads: int, dim: int) -> bool:
        return dim % 2 == 0 and can_attend(num_heads, kv_heads, dim, dim)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (…, dim), weight (dim,) -> x / rms(x) * weight."""
        x = x.contiguous()
        self._check(x, weight)
        out = torch.empty_like(x)
        dim = x.shape[-1]
        num_warps = 4 if dim <= 2048 else 8
        normalise[(x.numel() // dim,)](
            x, weight, out, eps, DIM=dim, PAD=triton.next_power_of_2(dim), num_warps=num_warps
        )
        return out

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """gate_up (T, 2 * dim) -> silu(gate) * up (T, dim)."""
        self._check(gate_up)
        assert gate_up.is_contiguous()
        num_tokens, both = gate_up.shape
        out = gate_up.new_empty(num_tokens, both // 2)
        tile = min(_GATE_TILE, triton.next_power_of_2(both // 2))
        grid = (num_tokens, triton.cdiv(both // 2, tile))
        gate_silu[grid](gate_up, out, DIM=both // 2, TILE=tile, num_warps=4)
        return out

    def likeliest(self, logits: Tensor) -> Tensor:
        return likeliest(logits)

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
        rotary = cos.shape[-1]
        self._check(qkv, cos, sin, keys, values)
        assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin, keys, values))
        assert keys.shape == values.shape
        q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
        turn_and_keep[(num_tokens, num_heads + 2 * kv_heads)](
            qkv,
            cos,
            sin,
            q_norm,
            k_norm,
            slots,
            keys,
            values,
            eps,
            NUM_HEADS=num_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            ROTARY=rotary,
            HALF_PAD=triton.next_power_of_2(rotary // 2),
            REST_PAD=triton.next_power_of_2(dim - rotary) if rotary < dim else 0,
            HAS_NORMS=norms is not None,
            num_warps=1,
        )

    def _check(self, *tensors: Tensor) -> None:
        assert all(tensor.dtype == self.dtype for tensor in tensors)


def draw_rows(logits: Tensor, cells: Tensor, rows: Tensor, *, is_limited: bool) -> Tensor:
    """Chooses each row's next token, without waiting for the device.

    logits (n, vocab_size) of any float type; cells int64 (num_rows, width) and rows int64 (n,) as
    in RequestState; `is_limited`: some row has top-k, top-p or min-p -> ids int64 (n,), or OPEN for
    rows whose logits are not finite.
    """
    logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    tile = min(_DRAW_TILE, triton.next_power_of_2(vocab_size))
    num_tiles = triton.cdiv(vocab_size, tile)
    lowest = logits.new_empty(num_rows, dtype=torch.float32)
    sizes = {"CELLS": cells.stride(0), "VOCAB": vocab_size}
    if is_limited:
        wide = min(_SEARCH_TILE, triton.next_power_of_2(vocab_size))
        find_lowest[(num_rows,)](logits, cells, rows, lowest, **sizes, TILE=wide, num_warps=16)
    scores = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    ids = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    draw_tiles[(num_rows, num_tiles)](
        logits, cells, rows, lowest, scores, ids, **sizes, TILE=tile, IS_LIMITED=is_limited
    )
    token_ids = torch.empty_like(rows)
    join_draws[(num_rows,)](
        scores,
        ids,
        token_ids,
        TILES=num_tiles,
        TILES_PAD=triton.next_power_of_2(num_tiles),
        OPEN=OPEN,
    )
    return token_ids
