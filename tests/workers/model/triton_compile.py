"""Compiles every Triton kernel for a GPU that need not exist, and prints what it uses.

`python -m tests.workers.model.triton_compile 90 bfloat16:128:32:8 float32:64:8:8`: a compute
capability, then a type, a head size, and the numbers of query and of KV heads. The kernels are
called with CPU tensors as the engine calls them; each launch is turned into a compilation for that
capability. Prints one JSON object: for each compiled variant, by kernel, its bytes of shared memory
and of spilled registers. Runs in a process of its own, without Triton's interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from tests.workers.model.test_triton_attention import Case, random_tensors
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.reference import RowsStep
from workers.model.attention.triton_attention import TritonAttention
from workers.model.gpu.kernels import TritonKernels, draw_rows

BLOCK_SIZE = 16
CPU = torch.device("cpu")
PLAIN = AttentionFlags(0.1)


@dataclass(frozen=True)
class Layer:
    """A layer's type, head size, and numbers of query and KV heads."""

    dtype: torch.dtype
    dim: int
    heads: tuple[int, int]

    @property
    def flags(self) -> tuple[AttentionFlags, ...]:
        """The most usual layer is compiled with every flag too."""
        every = AttentionFlags(0.1, 100, 30.0, torch.ones(self.heads[0]))
        return (PLAIN, every) if (self.dim, self.heads) == (128, (32, 8)) else (PLAIN,)


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


def compile_all(capability: int, layers: list[Layer]) -> dict[str, list[tuple[int, int]]]:
    """Bytes of shared memory and of spilled registers of each compiled variant, by kernel."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        variants = found.setdefault(self.fn.__name__, {})
        if kernel.hash not in variants:
            variants[kernel.hash] = kernel.metadata.shared, _spilled_bytes(kernel.asm["cubin"])
        return kernel

    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = compile_only
    for layer in layers:
        for flags in layer.flags:
            _attend(layer, flags)
    for dtype in {layer.dtype for layer in layers}:
        _compute_beside(TritonKernels(dtype), dtype)
        _draw(dtype)
    return {name: list(variants.values()) for name, variants in found.items()}


def _spilled_bytes(cubin: bytes) -> int:
    """Of each thread's stack; Triton itself reads the number from a GPU's driver only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = triton.knobs.nvidia.cuobjdump.path
        command = [program, "-res-usage", file.name]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"STACK:(\d+)", listed)
    assert found is not None, listed
    return int(found[1])


def _attend(layer: Layer, flags: AttentionFlags) -> None:
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
        case = Case(chunks, layer.heads, (layer.dim, layer.dim), flags, layer.dtype)
        prepared.attend(*random_tensors(case), flags)
    for num_rows in (1, 2, 16):
        positions, tables = torch.full((num_rows,), 700), torch.zeros(num_rows, 64).long()[:, 9:]
        step = RowsStep(torch.arange(num_rows), positions, tables, 90, None, BLOCK_SIZE)
        chunks = [(700, 1)] * num_rows
        case = Case(chunks, layer.heads, (layer.dim, layer.dim), flags, layer.dtype)
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


def _layer(text: str) -> Layer:
    name, dim, num_heads, kv_heads = text.split(":")
    return Layer(getattr(torch, name), int(dim), (int(num_heads), int(kv_heads)))


if __name__ == "__main__":
    print(json.dumps(compile_all(int(sys.argv[1]), [_layer(text) for text in sys.argv[2:]])))
