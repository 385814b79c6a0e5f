"""Compares kernels and engine with references, on the shapes that are then timed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_check.machine import Machine
from bench.gpu_check.served import Served, closed_workload
from bench.models import whole_chunk
from infra.bench.engine import run_workload
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.reference import ReferenceAttention
from workers.model.attention.triton_attention import TritonAttention
from workers.model.gpu.kernels import TritonKernels

# The largest difference of an element, divided by the largest element.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_BLOCK_SIZE = 16
# In standard deviations of a row's logits; half precision stays within 0.15 in the tests.
_MAX_BEHIND = 0.3


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one comparison."""

    name: str
    passed: bool
    detail: str


def check_kernels(machine: Machine) -> list[Check]:
    """Every kernel, and attention with every flag, at the shapes' heads."""
    found = [_check_attention(machine, *case) for case in _attention_cases(machine)]
    return found + _check_other_kernels(machine)


_Case = tuple[str, tuple[int, int], int, AttentionFlags, list[tuple[int, int]]]


def _attention_cases(machine: Machine) -> list[_Case]:
    sinks = torch.linspace(-2, 2, 4, device=machine.device)
    every_flag = AttentionFlags(0.1, 100, 30.0, sinks)
    decode, mixed = [(1500, 1), (70, 1), (512, 1)], [(0, 700), (900, 300), (1300, 1)]
    heads = {"Qwen3-8B": (32, 8), "Qwen3-0.6B": (16, 8), "Llama-2-7B": (32, 32)}
    if machine.is_tiny:
        decode, mixed, heads = [(600, 1), (7, 1)], [(0, 20), (30, 1)], {"tiny": (2, 1)}
    cases: list[_Case] = []
    for name, chunks in (("decode", decode), ("mixed", mixed)):
        cases += [(f"{name}, {m}", h, 128, AttentionFlags(0.1), chunks) for m, h in heads.items()]
        cases += [(f"{name}, every flag, {d}", (4, 2), d, every_flag, chunks) for d in (64, 256)]
    return cases


def _check_attention(
    machine: Machine,
    name: str,
    heads: tuple[int, int],
    dim: int,
    flags: AttentionFlags,
    chunks: list[tuple[int, int]],
) -> Check:
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
    ours, reference = (
        backend.prepare(spans, machine.device).attend(query, keys, values, flags)
        for backend in (TritonAttention(_BLOCK_SIZE), ReferenceAttention())
    )
    return _compare(f"attention: {name}", ours, reference)


def _check_other_kernels(machine: Machine) -> list[Check]:
    device, dtype = machine.device, machine.dtype
    kernels = TritonKernels(dtype)
    hidden, inner, num_tokens = (64, 96, 3) if machine.is_tiny else (4096, 12_288, 300)
    x, weight = torch.randn(num_tokens, hidden, device=device).to(dtype), torch.randn(hidden)
    weight = weight.to(device, dtype)
    gate_up = torch.randn(num_tokens, 2 * inner, device=device).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    normed = F.rms_norm(x.float(), (hidden,), weight.float(), 1e-6)
    found = [
        _compare("norm", kernels.rms_norm(x, weight, 1e-6), normed),
        _compare("gate", kernels.silu_gate(gate_up), F.silu(gate) * up),
    ]
    return [*found, *_check_rotation(kernels, num_tokens, device)]


def _check_rotation(kernels: TritonKernels, num_tokens: int, device: torch.device) -> list[Check]:
    """The fused kernel of head norms, rotation and cache write."""
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
    return [
        _compare("rotation of queries", found, rotated[0]),
        _compare("rotation of cached keys", keys[slots], rotated[1]),
        _compare("cached values", values[slots], value),
    ]


@torch.inference_mode()
def check_engine(served: Served) -> Check:
    """Generates greedy tokens with steps ahead, graphs and kernels. By the logits of the torch
    reference each must be the best token, or nearly as good."""
    context, num_output = (9, 5) if served.machine.is_tiny else (512, 32)
    workload = closed_workload(served, min(4, served.max_streams), context, num_output)
    run = run_workload(served.engine(), workload)
    worst, num_best, num_all = 0.0, 0, 0
    for request, timeline in zip(workload.requests, run.timelines, strict=True):
        known = [*request.prompt_token_ids, *timeline.token_ids[:-1]]
        rows = _reference_logits(served, known)[context - 1 :].float()
        chosen = rows.gather(1, torch.tensor(timeline.token_ids, device=rows.device)[:, None])
        behind = (rows.max(-1, keepdim=True).values - chosen) / rows.std(-1, keepdim=True)
        worst = max(worst, float(behind.max()))
        num_best += int((behind == 0).sum())
        num_all += len(behind)
    detail = f"{num_best} of {num_all} tokens the best, worst {worst:.3f} deviations behind"
    return Check(f"engine: {served.shape.name}", worst <= _MAX_BEHIND, detail)


def _reference_logits(served: Served, token_ids: list[int]) -> Tensor:
    """(num_tokens, vocab_size) by reference attention, in one chunk."""
    runner = served.runner
    attention, runner.backend = runner.backend, ReferenceAttention()
    try:
        return runner.logits([whole_chunk(token_ids, runner.block_size, samples=True)])
    finally:
        runner.backend = attention


def _compare(name: str, found: Tensor, expected: Tensor) -> Check:
    difference = float((found.float() - expected.float()).abs().max())
    share = difference / float(expected.float().abs().max())
    return Check(name, share <= _TOLERANCE[found.dtype], f"off by {share:.1e} of the largest")


def run_check(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Runs a check; an exception counts as failure and does not stop the others."""
    try:
        return check()
    except Exception as exc:  # a kernel's compiler may raise anything
        return [Check(name, False, f"{type(exc).__name__}: {str(exc).splitlines()[:1]}")]
