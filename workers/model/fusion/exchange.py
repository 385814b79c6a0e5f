"""Decides which modules of a decoder are replaced: those whose replacement gives equal results.

A new module is tried on all recorded calls of the old one. If a result differs or it raises, the
old module stays, so an unfamiliar architecture costs speed, never correctness. `proof` then checks
the whole model.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.attention.interface import LayerShape
from workers.model.fusion.blocks import (
    MergedAttention,
    MergedMLP,
    head_norms,
    is_attention,
    is_gated_mlp,
    is_rms_norm,
    norm_eps,
    possible_weights,
)
from workers.model.kv_cache import KVCache
from workers.model.linear import NativeRMSNorm
from workers.model.matmul_choice import Layout, weight_of
from workers.model.native.kernels import Kernels
from workers.model.quantization import QuantizedLinear

# Largest difference of an element as a share of its row's largest.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(slots=True)
class ModuleCall:
    """One call of a module. Its tensors are copies: a model may modify them in place."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def repeat(self, module: nn.Module) -> Any:
        """Calls another module with the same arguments. Raises what it raises."""
        return module(*_copied(self.args), **_copied(self.kwargs))


Calls = dict[str, list[ModuleCall]]  # by the module's name


@contextmanager
def noting_calls(decoder: nn.Module, names: Iterable[str]) -> Iterator[Calls]:
    """Records all calls of these modules. A module without calls has no entry."""
    calls: Calls = {}
    with ExitStack() as stack:
        for name in names:
            for handle in _note_calls(decoder.get_submodule(name), name, calls):
                stack.callback(handle.remove)
        yield calls


def _note_calls(module: nn.Module, name: str, calls: Calls) -> tuple[Any, Any]:
    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, []).append(ModuleCall(_copied(args), _copied(kwargs)))

    def end(_: nn.Module, args: Any, output: Any) -> None:
        calls[name][-1].output = _copied(output)

    before = module.register_forward_pre_hook(begin, with_kwargs=True)
    return before, module.register_forward_hook(end)


def agrees(module: nn.Module, calls: Seq[ModuleCall]) -> bool:
    """Whether a module gives the recorded results."""
    try:
        return all(is_close(call.repeat(module), call.output) for call in calls)
    except Exception:  # whatever it raises, it does not fit
        return False


def is_close(found: Any, expected: Any) -> bool:
    """Whether tensors (…, dim), or tuples of them, agree in shape and type and differ only by
    rounding; other values must be equal."""
    if isinstance(expected, tuple):
        return (
            isinstance(found, tuple)
            and len(found) == len(expected)
            and all(map(is_close, found, expected))
        )
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    if not isinstance(found, Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if expected.dtype not in TOLERANCE:
        return torch.equal(found, expected)
    largest = expected.float().abs().amax(-1)
    difference = (found.float() - expected.float()).abs().amax(-1)
    return bool((difference <= TOLERANCE[expected.dtype] * largest).all())


def _copied(value: Any) -> Any:
    """Copies all tensors in a value; other objects stay the same."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return value


ATTENTION, MLP, NORM, LINEAR = "attention layers", "gated MLPs", "norms", "other linear layers"


@dataclass(slots=True)
class Exchanged:
    """Names, by kind, of replaced modules and of those that failed the comparison."""

    exchanged: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)


@dataclass(eq=False)
class Exchange:
    """Replaces modules of one decoder by faster ones.

    Stores names, not modules, so that replaced weights are freed.
    """

    _decoder: nn.Module
    _shapes: Mapping[str, LayerShape]  # of each attention layer, by name
    _cache: KVCache
    _kernels: Kernels | None
    _layout: Layout

    def candidates(self) -> dict[str, str]:
        """Name and kind of each replaceable module, including nested ones."""
        kinds = {name: self._kind(name, module) for name, module in self._decoder.named_modules()}
        return {name: kind for name, kind in kinds.items() if kind}

    @torch.inference_mode()
    def apply(self, candidates: Mapping[str, str], calls: Calls) -> Exchanged:
        """Replaces modules that agree with their calls; modules without calls stay. `candidates`
        lists each module right before its children."""
        done = Exchanged()
        exchanged = ""
        for name, kind in candidates.items():
            is_gone = exchanged and name.startswith(f"{exchanged}.")
            if is_gone or name not in calls:
                continue
            try:
                new = self._replacement(name, kind, calls[name])
            except Exception:  # it has an unexpected structure
                new = None
            names = done.refused if new is None else done.exchanged
            names.setdefault(kind, []).append(name)
            if new is not None:
                self._decoder.set_submodule(name, new)
                exchanged = name
        return done

    def _kind(self, name: str, module: Any) -> str | None:
        if module._forward_pre_hooks or module._forward_hooks:
            return None  # hooks do more than its forward
        if name in self._shapes and is_attention(module) and _can_take(module.q_proj):
            return ATTENTION
        if is_gated_mlp(module) and _can_take(module.gate_proj):
            return MLP
        if self._kernels is not None and is_rms_norm(module):
            return NORM if module.weight.dtype == self._kernels.dtype else None
        is_linear = type(module) in (nn.Linear, QuantizedLinear)
        return LINEAR if is_linear and _can_take(module) else None

    def _replacement(self, name: str, kind: str, calls: Seq[ModuleCall]) -> nn.Module | None:
        old: Any = self._decoder.get_submodule(name)
        if kind == ATTENTION:
            return self._attention(old, self._shapes[name], calls)
        if kind == NORM:
            assert self._kernels is not None
            return _norm(old, self._kernels, calls)
        new: nn.Module
        if kind == MLP:
            new = MergedMLP(old, self._kernels, self._layout)
        else:
            new = self._layout.linear(weight_of(old), old.bias)
        return new if agrees(new, calls) else None

    def _attention(self, old: Any, shape: LayerShape, calls: Seq[ModuleCall]) -> nn.Module | None:
        dim = int(old.head_dim)
        is_known = (
            (shape.k_dim, shape.v_dim) == (dim, dim)
            and calls[0].kwargs.get("position_embeddings") is not None
            and _has_known_norms(old, dim)
        )
        if not is_known:
            return None
        turns_natively = self._can_turn(old, shape, calls[0])
        new = MergedAttention(old, shape.flags, self._layout, turns_natively=turns_natively)
        layers = self._cache.layers
        layers[new] = layers[old]  # the recorded steps look it up there
        is_right = agrees(new, calls)
        del layers[old if is_right else new]
        return new if is_right else None

    def _can_turn(self, old: Any, shape: LayerShape, call: ModuleCall) -> bool:
        """Whether a kernel supports these heads and this family's rotary size."""
        cos, _ = call.kwargs["position_embeddings"]
        num_heads = old.q_proj.out_features // old.head_dim
        return self._kernels is not None and all(
            self._kernels.can_turn(num_heads, shape.kv_heads, dim)
            for dim in (old.head_dim, cos.shape[-1])
        )


def _can_take(linear: nn.Linear | QuantizedLinear) -> bool:
    return weight_of(linear).dtype in TOLERANCE


def _has_known_norms(attention: Any, dim: int) -> bool:
    """Whether queries and keys have no norms, or one weight per head dimension."""
    try:
        norms = head_norms(attention)
    except (AttributeError, AssertionError):
        return False
    return norms is None or all(weight.shape == (dim,) for weight in norms[:2])


def _norm(old: Any, kernels: Kernels, calls: Seq[ModuleCall]) -> nn.Module | None:
    try:
        eps = norm_eps(old)
    except AttributeError:
        return None
    for weight in possible_weights(old):
        new = NativeRMSNorm(weight, eps, kernels)
        if agrees(new, calls):
            return new
    return None
