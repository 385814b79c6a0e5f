"""Compares every kernel with a reference, at the heads and widths of real models; and the whole own
engine, in this process, with transformers on the same weights."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_check.record import Finding
from bench.models import SHAPES, TINY, random_decoder
from infra.measure.engine import run_workload
from infra.measure.workloads import log_uniform_workload
from workers.engine_process.engine_setup import build_engine
from workers.ipc.messages import EngineOptions
from workers.model.ahead.runner import AheadRunner
from workers.model.ahead.self_test import wrong_draws
from workers.model.attention.interface import AttentionFlags, Span
from workers.model.attention.reference import SPLIT_TOKENS, ReferenceAttention, RowsStep
from workers.model.attention.triton_attention import TritonAttention
from workers.model.gpu.drawing import draw
from workers.model.gpu.graphs import sizes_up_to
from workers.model.gpu.kernels import TritonKernels
from workers.model.gpu.request_state import RequestState
from workers.model.loader import wrap_decoder
from workers.model.staging import to_device

# The largest difference of an element, divided by the largest element.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_BLOCK_SIZE = 16
_NUM_LAYERS = 4  # of the widths of Qwen3-8B
_KV_BYTES = 2**30
# How far the engine's token may be behind, in standard deviations of a row's logits. In bfloat16
# transformers differed from itself by 0.15 over 36 layers, where it computed token by token.
_MOST_BEHIND = {torch.float32: 0.01, torch.bfloat16: 0.3}


@dataclass(frozen=True, slots=True)
class Machine:
    """The device to check. `is_tiny`: run everything at sizes that are fast on a CPU."""

    device: torch.device
    is_tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_cuda else torch.float32


def kernel_checks(machine: Machine) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Yields every kernel, and attention with every flag, at the shapes' heads, by name."""
    torch.manual_seed(0)
    every_flag = AttentionFlags(0.1, 100, 30.0, torch.linspace(-2, 2, 4, device=machine.device))
    chunks = {"decode": [(1500, 1), (70, 1), (512, 1)], "mixed": [(0, 700), (900, 300), (1300, 1)]}
    heads = {"Qwen3-8B": (32, 8), "Qwen3-14B": (40, 8), "Llama-2-7B": (32, 32)}
    hidden, inner, num_tokens, vocab_sizes = 4096, 12_288, 300, (32_000, 151_936)
    if machine.is_tiny:
        chunks = {"decode": [(600, 1), (7, 1)], "mixed": [(0, 20), (30, 1)]}
        heads = {"tiny": (2, 1)}
        hidden, inner, num_tokens, vocab_sizes = 64, 96, 3, (60, 9_000)
    for step, parts in chunks.items():
        cases = [(model, each, 128, AttentionFlags(0.1)) for model, each in heads.items()]
        cases += [(f"every flag, {dim}", (4, 2), dim, every_flag) for dim in (64, 256)]
        for name, each, dim, flags in cases:
            check = partial(_check_attention, machine, each, dim, flags, parts)
            yield f"attention: {step}, {name}", check
    yield "norm", partial(_check_norm, machine, num_tokens, hidden)
    yield "gate", partial(_check_gate, machine, num_tokens, inner)
    yield "rotation and cache", partial(_check_rotation, machine, num_tokens)
    for vocab_size in vocab_sizes:
        yield f"sampling: {vocab_size} tokens", partial(_check_draws, machine, vocab_size)


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
    """The fused kernel of head norms, rotation and cache write."""
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
    kept = (keys[slots], values[slots])
    return _compare(torch.cat([found, *kept], dim=1), torch.cat([*rotated, value], dim=1))


def _compare(found: Tensor, expected: Tensor) -> Finding:
    difference = float((found.float() - expected.float()).abs().max())
    share = difference / float(expected.float().abs().max())
    return Finding(share <= _TOLERANCE[found.dtype], f"off by {share:.1e} of the largest")


def engine_checks(machine: Machine) -> Iterator[tuple[str, Finding]]:
    """Loads some layers as a worker does, with its defaults for a GPU, and yields whether all
    graphs are recorded, and each greedy token right. Raises ModelRefused."""
    shape, num_layers = (TINY, 2) if machine.is_tiny else (SHAPES[3], _NUM_LAYERS)
    config = shape.config(num_hidden_layers=num_layers)
    options = EngineOptions(model_path="", device=machine.device.type, kv_memory_bytes=_KV_BYTES)
    if not machine.is_cuda:  # what runs of it in Triton's interpreter
        small = {"kv_memory_bytes": 2**20, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        options = msgspec.structs.replace(options, attention="triton", ahead=True, **small)
    model = wrap_decoder(
        lambda: random_decoder(config, machine.device, machine.dtype),
        config,
        machine.device,
        machine.dtype,
        options,
        partial(print, file=sys.stderr, flush=True),
        max_model_len=1024 if machine.is_tiny else 4096,
    )
    if machine.is_cuda:
        yield "CUDA graphs", graphs_of(model, options.num_places)
    num_requests, num_in, num_out = (2, 9, 4) if machine.is_tiny else (4, 512, 32)
    workload = log_uniform_workload(
        num_requests, shape.vocab_size, prompt_tokens=(num_in,) * 2, output_tokens=(num_out,) * 2
    )
    run = run_workload(build_engine(model, shape.vocab_size, options), workload)
    prompts = [request.prompt_token_ids for request in workload.requests]
    outputs = [timeline.token_ids for timeline in run.timelines]
    reference = random_decoder(config, machine.device, machine.dtype, "sdpa")
    yield "engine's tokens", compare_tokens(reference, prompts, outputs)


def graphs_of(model: object, max_num_seqs: int) -> Finding:
    """Whether steps of every size are recorded: the loader goes on without graphs that fail."""
    if not isinstance(model, AheadRunner) or model.decoder.graphs is None:
        return Finding(False, "steps are not recorded; the log gives the reason")
    num_recorded, num_wanted = len(model.decoder.graphs.sizes), len(sizes_up_to(max_num_seqs))
    return Finding(num_recorded == num_wanted, f"{num_recorded} of {num_wanted} are recorded")


@torch.inference_mode()
def compare_tokens(
    decoder: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Finding:
    """Checks that each greedy token is the best for a decoder with torch's own attention, or
    nearly."""
    worst, num_best, num_all = 0.0, 0, 0
    allowed = _MOST_BEHIND[decoder.dtype]
    for prompt, output in zip(prompts, outputs, strict=True):
        known = torch.tensor([[*prompt, *output[:-1]]], device=decoder.device)
        logits: Tensor = decoder(input_ids=known, use_cache=False).logits
        rows = logits[0, len(prompt) - 1 :].float()  # (number of output tokens, vocab_size)
        chosen = rows.gather(1, torch.tensor(output, device=rows.device)[:, None])
        behind = (rows.max(-1, keepdim=True).values - chosen) / rows.std(-1, keepdim=True)
        worst = max(worst, float(behind.max()))
        num_best += int((behind == 0).sum())
        num_all += len(behind)
    detail = (
        f"{num_best} of {num_all} tokens the best, worst {worst:.3f} deviations behind, "
        f"at most {allowed:.3f} allowed"
    )
    return Finding(worst <= allowed, detail)
