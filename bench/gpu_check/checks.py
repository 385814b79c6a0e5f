"""Compares every kernel with a reference, at the heads and widths of real models."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_check.machine import Machine
from bench.gpu_check.record import Finding
from workers.model.ahead.draw_check import wrong_draws
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.reference import SPLIT_TOKENS, ReferenceAttention, RowsStep
from workers.model.attention.triton_attention import TritonAttention
from workers.model.gpu.drawing import draw
from workers.model.gpu.kernels import TritonKernels
from workers.model.gpu.request_state import RequestState
from workers.model.staging import to_device

# The largest difference of an element, divided by the largest element.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_BLOCK_SIZE = 16


def kernel_checks(machine: Machine) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Yields every kernel, and attention with every flag, at the shapes' heads, by name."""
    torch.manual_seed(0)
    for name, heads, dim, flags, chunks in _attention_cases(machine):
        check = partial(_check_attention, machine, heads, dim, flags, chunks)
        yield f"attention: {name}", check
    hidden, inner, num_tokens = (64, 96, 3) if machine.is_tiny else (4096, 12_288, 300)
    yield "norm", partial(_check_norm, machine, num_tokens, hidden)
    yield "gate", partial(_check_gate, machine, num_tokens, inner)
    yield "rotation and cache", partial(_check_rotation, machine, num_tokens)
    for vocab_size in (60, 9_000) if machine.is_tiny else (32_000, 151_936):
        yield f"sampling: {vocab_size} tokens", partial(_check_draws, machine, vocab_size)


_Case = tuple[str, tuple[int, int], int, AttentionFlags, list[tuple[int, int]]]


def _attention_cases(machine: Machine) -> list[_Case]:
    sinks = torch.linspace(-2, 2, 4, device=machine.device)
    every_flag = AttentionFlags(0.1, 100, 30.0, sinks)
    decode, mixed = [(1500, 1), (70, 1), (512, 1)], [(0, 700), (900, 300), (1300, 1)]
    heads = {"Qwen3-8B": (32, 8), "Qwen3-14B": (40, 8), "Llama-2-7B": (32, 32)}
    if machine.is_tiny:
        decode, mixed, heads = [(600, 1), (7, 1)], [(0, 20), (30, 1)], {"tiny": (2, 1)}
    cases: list[_Case] = []
    for name, chunks in (("decode", decode), ("mixed", mixed)):
        cases += [(f"{name}, {m}", h, 128, AttentionFlags(0.1), chunks) for m, h in heads.items()]
        cases += [(f"{name}, every flag, {d}", (4, 2), d, every_flag, chunks) for d in (64, 256)]
    return cases


def _check_attention(
    machine: Machine,
    heads: tuple[int, int],
    dim: int,
    flags: AttentionFlags,
    chunks: list[tuple[int, int]],
) -> Finding:
    generator = np.random.default_rng(0)
    num_blocks = sum(-(-(start + n) // _BLOCK_SIZE) for start, n in chunks)
    blocks = generator.permutation(num_blocks).tolist()
    spans, first = [], 0
    for start, num_tokens in chunks:
        end = start + num_tokens
        table = np.array([blocks.pop() for _ in range(-(-end // _BLOCK_SIZE))], dtype=np.int64)
        slots = (table[:, None] * _BLOCK_SIZE + np.arange(_BLOCK_SIZE)).reshape(-1)[:end]
        spans.append(Span(first, num_tokens, start, slots))
        first += num_tokens
    num_slots = num_blocks * _BLOCK_SIZE
    query = torch.randn(first, heads[0], dim, device=machine.device).to(machine.dtype)
    keys, values = (
        torch.randn(num_slots, heads[1], dim, device=machine.device).to(machine.dtype)
        for _ in range(2)
    )
    reference, triton = ReferenceAttention(), TritonAttention(_BLOCK_SIZE)
    expected = reference.prepare(spans, machine.device).attend(query, keys, values, flags)
    finding = _compare(
        triton.prepare(spans, machine.device).attend(query, keys, values, flags), expected
    )
    if first > len(chunks) or not finding.passed:
        return finding
    rows = triton.prepare_rows(_on_the_device(spans, machine.device))
    return _compare(rows.attend(query, keys, values, flags), expected)


def _on_the_device(spans: list[Span], device: torch.device) -> RowsStep:
    """Returns the same single tokens, with their tables on the device, in another order there."""
    positions = np.array([span.start for span in spans])
    tables = np.zeros((len(spans), 1 + positions.max() // _BLOCK_SIZE), dtype=np.int64)
    order = np.arange(len(spans))[::-1].copy()
    for row, span in zip(order, spans, strict=True):
        blocks = span.slots[::_BLOCK_SIZE] // _BLOCK_SIZE
        tables[row, : len(blocks)] = blocks
    most_parts = int((positions // SPLIT_TOKENS + 1).sum())
    rows, starts, tables_there = (to_device(x, device) for x in (order, positions, tables))
    return RowsStep(rows, starts, tables_there, most_parts, None, _BLOCK_SIZE)


def _check_draws(machine: Machine, vocab_size: int) -> Finding:
    """Compares the kernels that draw tokens, with limits and without, with the sampler."""
    state = RequestState(8, 8, 4, 0, machine.device)
    wrong = wrong_draws(state, vocab_size, machine.dtype, partial(draw, by_triton=True))
    return Finding(wrong is None, wrong or "every token is the sampler's")


def _check_norm(machine: Machine, num_tokens: int, hidden: int) -> Finding:
    x = torch.randn(num_tokens, hidden, device=machine.device).to(machine.dtype)
    weight = torch.randn(hidden, device=machine.device).to(machine.dtype)
    expected = F.rms_norm(x.float(), (hidden,), weight.float(), 1e-6)
    return _compare(TritonKernels(machine.dtype).rms_norm(x, weight, 1e-6), expected)


def _check_gate(machine: Machine, num_tokens: int, inner: int) -> Finding:
    gate_up = torch.randn(num_tokens, 2 * inner, device=machine.device).to(machine.dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _compare(TritonKernels(machine.dtype).silu_gate(gate_up), F.silu(gate) * up)


def _check_rotation(machine: Machine, num_tokens: int) -> Finding:
    """The fused kernel of head norms, rotation and cache write; the worst of its three results."""
    device, kernels = machine.device, TritonKernels(machine.dtype)
    num_heads, kv_heads, dim, dtype = 4, 2, 128, kernels.dtype
    qkv = torch.randn(num_tokens, num_heads + 2 * kv_heads, dim, device=device).to(dtype)
    norms = torch.randn(2, dim, device=device).to(dtype)
    angles = torch.rand(num_tokens, dim // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(num_tokens, device=device)
    keys, values = torch.zeros(2, num_tokens, kv_heads, dim, device=device).to(dtype)
    query, key, value = torch.split(qkv.float(), [num_heads, kv_heads, kv_heads], dim=1)
    rotated = []
    for part, norm in ((query, norms[0]), (key, norms[1])):
        normed = F.rms_norm(part, (dim,), norm.float(), 1e-6)
        low, high = normed.chunk(2, dim=-1)
        halves = torch.cat([-high, low], dim=-1)
        rotated.append(normed * cos.float()[:, None] + halves * sin.float()[:, None])
    flat = qkv.reshape(num_tokens, -1).clone()
    kernels.rotate_and_keep(flat, num_heads, cos, sin, (*norms, 1e-6), slots, keys, values)
    found = flat.view(num_tokens, -1, dim)[:, :num_heads]
    findings = {
        "queries": _compare(found, rotated[0]),
        "cached keys": _compare(keys[slots], rotated[1]),
        "cached values": _compare(values[slots], value),
    }
    wrong = [name for name, finding in findings.items() if not finding.passed]
    details = ", ".join(f"{name} {finding.detail}" for name, finding in findings.items())
    return Finding(not wrong, details)


def _compare(found: Tensor, expected: Tensor) -> Finding:
    difference = float((found.float() - expected.float()).abs().max())
    share = difference / float(expected.float().abs().max())
    return Finding(share <= _TOLERANCE[found.dtype], f"off by {share:.1e} of the largest")
