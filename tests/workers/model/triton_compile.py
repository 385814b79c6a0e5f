"""Compiles every Triton kernel for a GPU that need not exist, and prints its use of shared memory.

`python -m tests.workers.model.triton_compile 90 64 128`, a compute capability and head sizes: the
kernels are called with CPU tensors as the engine calls them, and each launch is turned into a
compilation for that compute capability. Prints one JSON object: bytes of shared memory by kernel.
Runs in a process of its own, without Triton's interpreter.
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
from workers.model.gpu.kernels import TritonKernels

BLOCK_SIZE = 16
CPU = torch.device("cpu")


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


def compile_all(capability: int, head_sizes: list[int]) -> dict[str, list[int]]:
    """Bytes of shared memory of each compiled variant, by kernel."""
    found: dict[str, list[int]] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        found.setdefault(self.fn.__name__, []).append(kernel.metadata.shared)
        return kernel

    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = compile_only
    every_flag = AttentionFlags(0.1, 100, 30.0, torch.ones(8))
    for dim in head_sizes:
        _attend(torch.bfloat16, dim, AttentionFlags(0.1) if dim == 128 else every_flag)
    _compute_beside(TritonKernels(torch.bfloat16), torch.bfloat16)
    return found


def _attend(dtype: torch.dtype, dim: int, flags: AttentionFlags) -> None:
    """Single tokens with and without splits, a chunk, and tables on the device."""
    for chunks in ([(9, 1)], [(600, 1)], [(0, 40)]):
        case = Case(chunks, (8, 2), (dim, dim), flags, dtype)
        slots = np.arange(chunks[0][0] + chunks[0][1], dtype=np.int64)
        span = Span(0, chunks[0][1], chunks[0][0], slots)
        prepared = TritonAttention(BLOCK_SIZE).prepare([span], CPU)
        prepared.attend(*random_tensors(case), flags)
    rows = torch.tensor([0, 1])
    step = RowsStep(rows, torch.tensor([9, 700]), torch.zeros(2, 64).long()[:, 8:], 800, BLOCK_SIZE)
    case = Case([(9, 1), (700, 1)], (8, 2), (dim, dim), flags, dtype)
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


if __name__ == "__main__":
    print(json.dumps(compile_all(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])))
