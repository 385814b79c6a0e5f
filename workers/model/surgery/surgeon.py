"""Decides which modules of a decoder are exchanged: those whose replacement gives the same.

Every exchange is tried on random input first, the old module beside the new; one that differs
stays as it is. So a family that only looks like another costs speed, never answers.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.model.attention.interface import (
    STEP_KEYWORD,
    AttentionBackend,
    AttentionCall,
    AttentionFlags,
    Span,
)
from workers.model.backend import Backend
from workers.model.int8_weights import Int8Linear
from workers.model.kernels import DecoderKernels
from workers.model.kv_cache import KVCache, LayerShape, PagedStep
from workers.model.native.panels import Weight
from workers.model.surgery.blocks import (
    MergedAttention,
    MergedMLP,
    NativeRMSNorm,
    head_norms,
    is_attention,
    is_gated_mlp,
    is_rms_norm,
    norm_eps,
    possible_weights,
)
from workers.model.surgery.linear import Layout, weight_of

_TOKENS = 7  # of the random input
# Largest difference of an output's element, as a share of the largest element.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
# What a module raises that does not take the input we try it with.
_NO_FIT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


@dataclass(slots=True)
class Operation:
    """What was exchanged: counts by kind, and the new module of each old attention."""

    counts: Counter[str] = field(default_factory=Counter)
    attentions: dict[nn.Module, nn.Module] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{n} {kind}" for kind, n in self.counts.items()) or "nothing"


@torch.inference_mode()
def operate(
    decoder: nn.Module,
    shapes: Mapping[nn.Module, LayerShape],
    backend: Backend,
) -> Operation:
    """Exchanges what can be. `shapes`: what each attention layer keeps. Old weights are let go
    one module at a time, so that they never exist twice.
    """
    done = Operation()
    device = next(decoder.parameters()).device
    patch = _Patch(device, backend.layout)
    _Surgeon(shapes, backend.attention, backend.kernels, patch, done).visit(decoder)
    return done


@dataclass(frozen=True, slots=True)
class _Patch:
    """Where new modules are made and tried."""

    device: torch.device
    layout: Layout
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def can_take(self, weight: Weight) -> bool:
        return weight.dtype in _TOLERANCE

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)


@dataclass(frozen=True, slots=True)
class _Surgeon:
    shapes: Mapping[nn.Module, LayerShape]
    backend: AttentionBackend
    kernels: DecoderKernels | None
    patch: "_Patch"
    done: Operation

    def visit(self, parent: nn.Module) -> None:
        """Exchanges a module's children, and goes on into those that stay."""
        for name, old in list(parent.named_children()):
            kind, new = self._replacement(old)
            if new is None:
                self.visit(old)
                continue
            setattr(parent, name, new)
            self.done.counts[kind] += 1
            if old in self.shapes:
                self.done.attentions[old] = new

    def _replacement(self, old: nn.Module) -> tuple[str, nn.Module | None]:
        if old._forward_pre_hooks or old._forward_hooks:
            return "", None  # it does more than its forward says
        if not all(p.device == self.patch.device for p in old.parameters()):
            return "", None
        if old in self.shapes and is_attention(old):
            shape = self.shapes[old]
            new = _attention(old, shape, self.backend, self.kernels, self.patch)
            return "attention layers", new
        if is_gated_mlp(old):
            return "gated MLPs", _mlp(old, self.kernels, self.patch)
        if self.kernels is not None and is_rms_norm(old):
            return "norms", _norm(old, self.kernels, self.patch)
        if type(old) in (nn.Linear, Int8Linear) and self.patch.layout.packs:
            return "other linear layers", _linear(old, self.patch)
        return "", None


def _attention(
    old: Any,
    shape: LayerShape,
    backend: AttentionBackend,
    kernels: DecoderKernels | None,
    patch: "_Patch",
) -> nn.Module | None:
    weight, dim = weight_of(old.q_proj), int(old.head_dim)
    dtype = weight.dtype
    if not patch.can_take(weight) or (shape.k_dim, shape.v_dim) != (dim, dim):
        return None
    hidden = patch.random((1, _TOKENS, old.q_proj.in_features), dtype)
    angles = patch.random((1, _TOKENS, dim // 2), torch.float32).repeat(1, 1, 2)
    turns = (angles.cos().to(dtype), angles.sin().to(dtype))

    def run(module: Any, step: Any) -> Tensor:
        arguments = {"position_embeddings": turns, "attention_mask": None, STEP_KEYWORD: step}
        found: Tensor = module(hidden_states=hidden, **arguments)[0]
        return found

    noting = _NotingStep(_tiny_step(old, shape, dtype, backend, None, patch.device))
    try:
        expected = run(old, noting)
    except _NO_FIT:
        return None
    num_heads = old.q_proj.out_features // dim
    is_native = kernels is not None and kernels.can_turn(num_heads, shape.kv_heads, dim)
    if noting.flags is None or not _has_known_norms(old, dim):
        return None
    new = MergedAttention(old, noting.flags, patch.layout, turns_natively=is_native)
    step = _tiny_step(new, shape, dtype, backend, kernels, patch.device)
    return new if _agrees(lambda: run(new, step), expected) else None


def _has_known_norms(attention: Any, dim: int) -> bool:
    """No norms, or one weight of a head's size for queries and for keys."""
    try:
        norms = head_norms(attention)
    except (AttributeError, AssertionError):
        return False
    return norms is None or all(weight.shape == (dim,) for weight in norms[:2])


class _NotingStep:
    """Passes a call on and keeps its flags."""

    def __init__(self, step: PagedStep) -> None:
        self._step = step
        self.flags: AttentionFlags | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        self.flags = call.flags
        return self._step.attend(call)


def _tiny_step(
    module: nn.Module,
    shape: LayerShape,
    dtype: torch.dtype,
    backend: AttentionBackend,
    kernels: DecoderKernels | None,
    device: torch.device,
) -> PagedStep:
    """A step of one sequence of _TOKENS in a cache of its own."""
    cache = KVCache({module: shape}, 1, _TOKENS, dtype, device)
    slots = np.arange(_TOKENS, dtype=np.int64)
    spans = [Span(0, _TOKENS, 0, slots)]
    prepared = backend.prepare(spans, device)
    return PagedStep(cache, prepared, torch.from_numpy(slots).to(device), kernels)


def _mlp(old: Any, kernels: DecoderKernels | None, patch: "_Patch") -> nn.Module | None:
    weight = weight_of(old.gate_proj)
    if not patch.can_take(weight):
        return None
    x = patch.random((1, _TOKENS, weight.shape[1]), weight.dtype)
    new = MergedMLP(old, kernels, patch.layout)
    return new if _agrees(lambda: new(x), old(x)) else None


def _norm(old: Any, kernels: DecoderKernels, patch: "_Patch") -> nn.Module | None:
    if old.weight.dtype != kernels.dtype:
        return None
    x = patch.random((1, _TOKENS, old.weight.shape[0]), kernels.dtype)
    try:
        expected, eps = old(x), norm_eps(old)
    except _NO_FIT:
        return None
    for weight in possible_weights(old):
        new = NativeRMSNorm(weight, eps, kernels)
        if _agrees(lambda new=new: new(x), expected):  # type: ignore[misc]
            return new
    return None


def _linear(old: Any, patch: "_Patch") -> nn.Module | None:
    weight = weight_of(old)
    if not patch.can_take(weight):
        return None
    x = patch.random((1, _TOKENS, old.in_features), weight.dtype)
    new = patch.layout.linear(weight, old.bias)
    return new if _agrees(lambda: new(x), old(x)) else None


def _agrees(compute: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        found = compute()
    except _NO_FIT:
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = expected.float().abs().max()
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE[expected.dtype] * largest)
