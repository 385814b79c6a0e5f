"""Weights of one byte: each output of a linear layer is a row of integers and one scale.

Activations, sums and the KV cache keep their types. This module computes with torch, converting a
layer's weights at each use; faster kernels are in `native`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.engine.interface import ModelRefused

QUANTIZATIONS = ("none", "int8")
_LARGEST = 127  # -128 would have no positive counterpart
# If linear layers hold a smaller share of the weights, quantizing saves little.
_LEAST_SHARE = 0.5


class Norm(Protocol):
    """An RMSNorm applied before a layer."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """values int8 (out, in) in -127 … 127, scales float32 (out,); `dtype` is that of the inputs."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def widened(self) -> Tensor:
        """(out, in) of `dtype`."""
        return (self.values * self.scales[:, None]).to(self.dtype)


def rounded(weight: Tensor) -> QuantizedWeight:
    """Quantizes weight (out, in), finite. The largest value of each row sets its scale, so the
    error is at most half the row's scale."""
    exact = weight.detach().float()
    scales = exact.abs().amax(dim=1) / _LARGEST
    scales = torch.where(scales > 0, scales, 1.0)  # a row of zeros
    values = (exact / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return QuantizedWeight(values, scales, weight.dtype)


class QuantizedLinear(nn.Module):
    """x (…, in), normalised by `before` -> x @ weight.T + bias (…, out), by torch."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.values, self.scales, self.dtype = weight.values, weight.scales, weight.dtype
        self.bias = None if bias is None else bias.detach()

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scales, self.dtype)

    @property
    def weight(self) -> Tensor:
        """(out, in) in full type, for transformers code that reads it."""
        return self.quantized_weight.widened()

    def forward(self, x: Tensor, before: Norm | None = None) -> Tensor:
        x = x if before is None else before(x)
        if self.dtype == torch.float16:  # unscaled sums might overflow
            return F.linear(x, self.weight, self.bias)
        # Integers up to 127 are exact in bfloat16; scaled ones are not.
        out = F.linear(x, self.values.to(self.dtype)) * self.scales
        return (out if self.bias is None else out + self.bias).to(self.dtype)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out) -> to + forward(x)."""
        return to + self.forward(x)


def check_quantization(name: str, device: torch.device) -> None:
    """Raises ModelRefused for an unknown name, or one that is slow on the device."""
    if name not in QUANTIZATIONS:
        raise ModelRefused(f"quantization {name} is not one of {', '.join(QUANTIZATIONS)}")
    if name == "int8" and device.type != "cpu":
        raise ModelRefused(
            "quantization int8 is for CPUs: a GPU would convert the weights at each call, which "
            "takes longer than bfloat16 weights; use quantization none"
        )


def quantize(decoder: nn.Module) -> str:
    """Replaces the linear layers one at a time, and describes the result. Keeps embeddings, also
    one that shares its weight with the head. Raises ModelRefused."""
    linears = {path: module for path, module in decoder.named_modules() if _is_linear(module)}
    share = _num_weights(linears.values()) / max(1, _num_weights(decoder.modules()))
    if share < _LEAST_SHARE:
        raise ModelRefused(
            f"quantization int8 is for linear layers, and {type(decoder).__name__} keeps "
            f"{1 - share:.0%} of its matrices elsewhere"
        )
    num_linears, bytes_before, bytes_after = len(linears), 0, 0
    while linears:
        path, linear = linears.popitem()
        if not linear.weight.isfinite().all():
            raise ModelRefused(f"quantization int8: not all weights of {path} are finite numbers")
        weight = rounded(linear.weight)
        bytes_before, bytes_after = bytes_before + linear.weight.nbytes, bytes_after + weight.nbytes
        decoder.set_submodule(path, QuantizedLinear(weight, linear.bias))
    return (
        f"weights of {num_linears} linear layers are int8: {bytes_after / 2**20:.1f} MiB "
        f"where they were {bytes_before / 2**20:.1f}"
    )


def num_weight_bytes(decoder: nn.Module, device_type: str) -> int:
    """Bytes that a decoder keeps on a kind of device, counting each tensor once."""
    small = [m.quantized_weight for m in decoder.modules() if isinstance(m, QuantizedLinear)]
    kept = [t for t in decoder.parameters() if t.device.type == device_type]
    return sum(t.nbytes for t in kept) + sum(
        weight.nbytes for weight in small if weight.device.type == device_type
    )


def _is_linear(module: nn.Module) -> bool:
    """Whether it is exactly nn.Linear, no subclass."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and not has_hooks


def _num_weights(modules: Iterable[Any]) -> int:
    """Elements of weight matrices; embeddings are not multiplied, so they do not count."""
    own = (m.parameters(recurse=False) for m in modules if not isinstance(m, nn.Embedding))
    return sum({id(p): p.numel() for part in own for p in part if p.ndim > 1}.values())
