"""Attention, gated MLP and RMSNorm with merged projections and few calls.

Each is built from a module of transformers and replaces it; `exchange` compares the two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.attention.interface import (
    STEP_KEYWORD,
    AttentionCall,
    AttentionFlags,
)
from workers.model.linear import NativeGates
from workers.model.matmul_choice import Layout, are_linear, weight_of
from workers.model.native.kernels import VECTOR, Kernels
from workers.model.quantization import Norm

HeadNorms = tuple[Tensor, Tensor, float]  # weights (dim,) of query and key heads, and eps


class MergedAttention(nn.Module):
    """Rotary attention with one projection for queries, keys and values."""

    def __init__(
        self, old: Any, flags: AttentionFlags, layout: Layout, *, turns_natively: bool
    ) -> None:
        super().__init__()
        self.head_dim = int(old.head_dim)
        self.num_heads = old.q_proj.out_features // self.head_dim
        self.kv_heads = old.k_proj.out_features // self.head_dim
        self.flags = flags
        self.norms = head_norms(old)
        self.turns_natively = turns_natively
        self.qkv = layout.merged([old.q_proj, old.k_proj, old.v_proj])
        self.o_proj = layout.linear(weight_of(old.o_proj), old.o_proj.bias)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """hidden_states (1, T, hidden), position_embeddings cos and sin (1, T, rotary)."""
        step = kwargs[STEP_KEYWORD]
        cos, sin = (part.reshape(-1, part.shape[-1]) for part in position_embeddings)
        return self.o_proj(self.mix(hidden_states[0], cos, sin, step)[None]), None

    def mix(
        self, x: Tensor, cos: Tensor, sin: Tensor, step: Any, before: Norm | None = None
    ) -> Tensor:
        """x (T, hidden), normalised by `before`, cos and sin (T, rotary) -> the heads' outputs (T,
        num_heads * dim)."""
        out = self._attend(step, self.qkv(x, before), cos, sin)
        return out.reshape(len(out), -1)

    def _attend(self, step: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.turns_natively:
            found: Tensor = step.turn_and_attend(
                self, qkv, self.num_heads, cos, sin, self.norms, self.flags
            )
            return found
        heads = qkv.view(len(qkv), -1, self.head_dim)
        sizes = [self.num_heads, self.kv_heads, self.kv_heads]
        query, key, value = torch.split(heads, sizes, dim=1)
        if self.norms is not None:
            q_weight, k_weight, eps = self.norms
            query = F.rms_norm(query, (self.head_dim,), q_weight, eps)
            key = F.rms_norm(key, (self.head_dim,), k_weight, eps)
        query, key = _turn(query, cos, sin), _turn(key, cos, sin)
        call = AttentionCall(self, query, key, value, self.flags, has_mask=False, extra={})
        attended: Tensor = step.attend(call)
        return attended


def head_norms(attention: Any) -> HeadNorms | None:
    """The RMSNorm of each query and key head, if there is one. Raises AttributeError."""
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if q_norm is None and k_norm is None:
        return None
    assert q_norm is not None
    assert k_norm is not None
    return q_norm.weight.detach(), k_norm.weight.detach(), norm_eps(q_norm)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of x (T, heads, dim) by cos and sin (T, rotary); elements beyond
    `rotary` are unchanged."""
    rotary = cos.shape[-1]
    if rotary < x.shape[-1]:
        return torch.cat((_turn(x[..., :rotary], cos, sin), x[..., rotary:]), dim=-1)
    half = rotary // 2
    out = x * cos[:, None]
    out[..., :half].addcmul_(x[..., half:], sin[:, None, :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[:, None, half:])
    return out


class MergedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with one projection for gate and up."""

    def __init__(self, old: Any, kernels: Kernels | None, layout: Layout) -> None:
        super().__init__()
        self._act = old.act_fn
        is_silu = type(old.act_fn).__name__ in ("SiLU", "SiLUActivation")
        fits = is_silu and old.gate_proj.out_features % VECTOR == 0
        self._kernels = kernels if fits else None
        gates = layout.gates(old.gate_proj, old.up_proj) if is_silu else None
        self.gate_up = gates or layout.merged([old.gate_proj, old.up_proj])
        self.down_proj = layout.linear(weight_of(old.down_proj), old.down_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gated(x.reshape(-1, x.shape[-1])))
        return out.view(*x.shape[:-1], -1)

    def gated(self, x: Tensor, before: Norm | None = None) -> Tensor:
        """x (T, hidden), normalised by `before` -> act(gate) * up (T, intermediate)."""
        gate_up: Tensor = self.gate_up(x, before)
        if isinstance(self.gate_up, NativeGates):
            return gate_up
        if self._kernels is not None:
            return self._kernels.silu_gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        out: Tensor = self._act(gate) * up
        return out


def norm_eps(norm: Any) -> float:
    """The epsilon. Raises AttributeError if it has another name."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return float(eps)


def possible_weights(norm: Any) -> tuple[Tensor, ...]:
    """Possible factors of an RMSNorm: its weight, or 1 + its weight as in Gemma."""
    weight = norm.weight.detach()
    return weight, (1.0 + weight.float()).to(weight.dtype)


def is_attention(module: Any) -> bool:
    """Whether the module has the projections of rotary attention and only known modules between
    them; the comparison checks how it uses them."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return (
        are_linear([getattr(module, name, None) for name in names])
        and isinstance(getattr(module, "head_dim", None), int)
        and module.q_proj.out_features % module.head_dim == 0
        and module.k_proj.out_features % module.head_dim == 0
        and module.k_proj.out_features == module.v_proj.out_features
    )


def is_gated_mlp(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    return hasattr(module, "act_fn") and are_linear([getattr(module, name, None) for name in names])


def is_rms_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 1
        and weight.shape[0] % VECTOR == 0
    )
