"""Weights of one byte: each output of a linear layer is a row of small numbers and one scale.

Activations, sums and the KV cache keep their types. This module computes with torch, converting a
layer's int8 weights at each use; faster kernels for CPUs are in `native`. The product of float8
weights, for GPUs, is in `float8`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.engine.model import ModelRefused
from workers.model.float8 import (
    FLOAT8,
    check_float8,
    exact_product,
    fits,
    float8_product,
    float8_rows,
    rounds_inputs,
    wrong_product,
)

QUANTIZATIONS = ("none", "int8", "fp8")
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
    """values (out, in), int8 in -127 … 127 or float8, scales float32 (out,); `dtype` is that of
    the inputs."""

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
        values = self.values.to(self.dtype) if self.values.dtype == FLOAT8 else self.values
        return (values * self.scales[:, None]).to(self.dtype)


def rounded_to_float8(weight: Tensor) -> QuantizedWeight:
    """Quantizes weight (out, in), finite, to float8."""
    values, scales = float8_rows(weight.detach())
    return QuantizedWeight(values, scales[:, 0], weight.dtype)


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
        if self.values.dtype == FLOAT8:
            product = float8_product if rounds_inputs() else exact_product
            out = product(x, self.values, self.scales)
            return out if self.bias is None else out + self.bias
        if self.dtype == torch.float16:  # unscaled sums might overflow
            return F.linear(x, self.weight, self.bias)
        # Integers up to 127 are exact in bfloat16; scaled ones are not.
        out = F.linear(x, self.values.to(self.dtype)) * self.scales
        return (out if self.bias is None else out + self.bias).to(self.dtype)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out) -> to + forward(x)."""
        return to + self.forward(x)


def check_quantization(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> None:
    """Raises ModelRefused for an unknown name, or one that is slow on the device."""
    if name not in QUANTIZATIONS:
        raise ModelRefused(f"quantization {name} is not one of {', '.join(QUANTIZATIONS)}")
    if name == "int8" and device.type != "cpu":
        raise ModelRefused(
            "quantization int8 is for CPUs: a GPU would convert the weights at each call, which "
            "takes longer than bfloat16 weights; use fp8 on a device of compute capability 9 or "
            "more, else none"
        )
    if name == "fp8":
        check_float8(dtype, capability_of(device) if device.type == "cuda" else None)


def quantize(decoder: nn.Module, name: str = "int8") -> str:
    """Replaces the linear layers one at a time, and describes the result. `name`: int8 or fp8.
    Keeps embeddings, also one that shares its weight with the head. Raises ModelRefused."""
    linears = {path: module for path, module in decoder.named_modules() if _is_linear(module)}
    if name == "fp8":
        linears = {path: linear for path, linear in linears.items() if fits(linear)}
    share = _num_weights(linears.values()) / max(1, _num_weights(decoder.modules()))
    if share < _LEAST_SHARE:
        sizes = " of sizes that are multiples of 16" if name == "fp8" else ""
        raise ModelRefused(
            f"quantization {name} is for linear layers{sizes}, and {type(decoder).__name__} keeps "
            f"{1 - share:.0%} of its matrices elsewhere"
        )
    num_linears, bytes_before, bytes_after = len(linears), 0, 0
    while linears:
        path, linear = linears.popitem()
        if not linear.weight.isfinite().all():
            raise ModelRefused(f"quantization {name}: not all weights of {path} are finite numbers")
        weight = rounded_to_float8(linear.weight) if name == "fp8" else rounded(linear.weight)
        bytes_before, bytes_after = bytes_before + linear.weight.nbytes, bytes_after + weight.nbytes
        decoder.set_submodule(path, QuantizedLinear(weight, linear.bias))
    return (
        f"weights of {num_linears} linear layers are {name}: {bytes_after / 2**20:.1f} MiB "
        f"where they were {bytes_before / 2**20:.1f}"
    )


def check_products(decoder: nn.Module) -> None:
    """The products of one float8 layer of each shape. Raises ModelRefused where they are wrong."""
    small = (module for module in decoder.modules() if isinstance(module, QuantizedLinear))
    shapes = {(m.in_features, m.out_features): m for m in small if m.values.dtype == FLOAT8}
    for (num_in, num_out), linear in shapes.items():
        if reason := wrong_product(linear.values, linear.scales):
            raise ModelRefused(
                f"quantization fp8: the product with {num_in} inputs and {num_out} outputs fails "
                f"here: {reason}; use quantization none"
            )


def num_weight_bytes(decoder: nn.Module, device_type: str) -> int:
    """Bytes that a decoder keeps on a kind of device, counting each tensor once."""
    small = [m.quantized_weight for m in decoder.modules() if isinstance(m, QuantizedLinear)]
    kept = [t for t in decoder.parameters() if t.device.type == device_type]
    return sum(t.nbytes for t in kept) + sum(
        weight.nbytes for weight in small if weight.device.type == device_type
    )


def _is_linear(module: nn.Module) -> bool:
    """Exactly nn.Linear, no subclass."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and not has_hooks


def _num_weights(modules: Iterable[Any]) -> int:
    """Elements of weight matrices; embeddings are not multiplied, so they do not count."""
    own = (m.parameters(recurse=False) for m in modules if not isinstance(m, nn.Embedding))
    return sum({id(p): p.numel() for part in own for p in part if p.ndim > 1}.values())
