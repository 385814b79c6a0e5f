"""Compiles every Triton kernel for a GPU that need not exist, and prints its use of shared memory.

`python -m tests.workers.model.triton_compile 90 bfloat16:128 float32:64`: a compute capability,
then types and head sizes. The kernels are called with CPU tensors as the engine calls them; each
launch is turned into a compilation for that capability. Prints one JSON object: bytes of
shared memory of each compiled variant, by kernel. Runs in a process of its own, without Triton's
interpreter.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from tests.workers.model.test_triton_attention import Case, random_tensors
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.rows import RowsStep
from workers.model.attention.triton_attention import TritonAttention
from workers.model.gpu.kernels import TritonKernels, draw_rows

BLOCK_SIZE = 16
CPU = torch.device("cpu")
HEADS = (32, 8)
PLAIN = AttentionFlags(0.1)
EVERY_FLAG = AttentionFlags(0.1, 100, 30.0, torch.ones(HEADS[0]))


class _AbsentGpu:
    """The properties that Triton requests from its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_all(capability: int, heads: list[tuple[torch.dtype, int]]) -> dict[str, list[int]]:
    """Bytes of shared memory of each compiled variant, by kernel."""
    found: dict[str, dict[str, int]] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        found.setdefault(self.fn.__name__, {})[kernel.hash] = kernel.metadata.shared
        return kernel

    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = compile_only
    for dtype, dim in heads:
        for flags in (PLAIN, EVERY_FLAG) if dim == 128 else (PLAIN,):
            _attend(dtype, dim, flags)
    for dtype in {dtype for dtype, _ in heads}:
        _compute_beside(TritonKernels(dtype), dtype)
        _draw(dtype)
    return {name: list(variants.values()) for name, variants in found.items()}


def _attend(dtype: torch.dtype, dim: int, flags: AttentionFlags) -> None:
    """Single tokens with and without parts, a chunk, and tables on the device; widths of tables and
    numbers of rows whose divisors differ."""
    batches = [[(9, 1)], [(255, 1)], [(600, 1)], [(0, 40)], [(16, 1), (0, 40), (600, 2)]]
    for chunks in batches:
        spans, first = [], 0
        for start, num_tokens in chunks:
            slots = np.arange(start + num_tokens, dtype=np.int64)
            spans.append(Span(first, num_tokens, start, slots))
            first += num_tokens
        prepared = TritonAttention(BLOCK_SIZE).prepare(spans, CPU)
        case = Case(chunks, HEADS, (dim, dim), flags, dtype)
        prepared.attend(*random_tensors(case), flags)
    for num_rows in (1, 2, 16):
        positions, tables = torch.full((num_rows,), 700), torch.zeros(num_rows, 64).long()[:, 9:]
        step = RowsStep(torch.arange(num_rows), positions, tables, 90, None, BLOCK_SIZE)
        case = Case([(700, 1)] * num_rows, HEADS, (dim, dim), flags, dtype)
        TritonAttention(BLOCK_SIZE).prepare_rows(step).attend(*random_tensors(case), flags)


def _compute_beside(kernels: TritonKernels, dtype: torch.dtype) -> None:
    kernels.rms_norm(torch.randn(2, 4096).to(dtype), torch.randn(4096).to(dtype), 1e-6)
    kernels.silu_gate(torch.randn(2, 8192).to(dtype))
    dim, num_heads, kv_heads = 128, 8, 2
    for rotary in (dim, dim // 2):
        for norms in (None, (*torch.randn(2, dim).to(dtype), 1e-6)):
            qkv = torch.randn(2, (num_heads + 2 * kv_heads) * dim).to(dtype)
            cos, sin = torch.randn(2, 2, rotary).to(dtype)
            keys, values = torch.randn(2, 16, kv_heads, dim).to(dtype)
            slots = torch.tensor([1, 2])
            kernels.rotate_and_keep(qkv, num_heads, cos, sin, norms, slots, keys, values)


def _draw(dtype: torch.dtype) -> None:
    """With and without limits; numbers of rows and places of the order whose divisors differ."""
    cells, order = torch.zeros(20, 73, dtype=torch.int64), torch.arange(20)
    for is_limited in (False, True):
        for num_rows in (1, 2, 16):
            logits = torch.randn(num_rows, 151_936).to(dtype)
            draw_rows(logits, cells, order[1 : 1 + num_rows], is_limited=is_limited)


def _head(text: str) -> tuple[torch.dtype, int]:
    name, dim = text.split(":")
    return getattr(torch, name), int(dim)


if __name__ == "__main__":
    print(json.dumps(compile_all(int(sys.argv[1]), [_head(text) for text in sys.argv[2:]])))
