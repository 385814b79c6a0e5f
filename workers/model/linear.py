"""Linear layers; several are merged if they have the same input.

On a CPU the faster of our kernel and oneDNN's product is used. torch's defaults are slower: in
float32 it does not use oneDNN, in bfloat16 it converts the weights at each call.
"""

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.matmul_choice import Product, Products, Shape, multiply_packed, pack
from workers.model.native.kernels import Kernels, Weight
from workers.model.quantization import Norm, QuantizedLinear, QuantizedWeight


class PackedLinear(nn.Module):
    """x (…, in), normalised by `before` -> x @ weight.T + bias (…, out), by oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_out = weight.shape[0]
        self._packed = pack(weight)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor, before: Norm | None = None) -> Tensor:
        return multiply_packed(x if before is None else before(x), self._packed, self.bias)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out) -> to + forward(x), rounded once."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, to, self._packed, self.bias, "add"
        )
        return out


class PlainLinear(nn.Module):
    """x (…, in), normalised by `before` -> x @ weight.T + bias (…, out), by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_out = weight.shape[0]
        self._weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor, before: Norm | None = None) -> Tensor:
        return F.linear(x if before is None else before(x), self._weight, self.bias)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out), which is overwritten -> to + forward(x)."""
        if self.bias is not None:
            to += self.bias
        return to.addmm_(x, self._weight.T)


class NativeLinear(nn.Module):
    """x (…, in), normalised by `before` -> x @ weight.T + bias (…, out), by our kernel."""

    def __init__(self, weight: Weight, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.num_out = weight.shape[0]
        self.panels = kernels.lay_out(weight)
        self.bias = None if bias is None else bias.detach()
        self._kernels = kernels

    def forward(self, x: Tensor, before: Norm | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = self._kernels.linear(flat, self.panels, self.num_out, norm=_parts(before))
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.num_out)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out) -> to + forward(x), rounded once."""
        if self.bias is not None:
            to = to + self.bias
        return self._kernels.linear(x, self.panels, self.num_out, to)


class NativeGates(nn.Module):
    """x (T, in), normalised by `before` -> silu(x @ gate.T) * (x @ up.T) (T, out), by our
    kernel.
    """

    def __init__(self, gate: Weight, up: Weight, kernels: Kernels) -> None:
        super().__init__()
        self.num_out = gate.shape[0]
        self.panels = kernels.lay_out_gated(gate, up)
        self.kernels = kernels

    def forward(self, x: Tensor, before: Norm | None = None) -> Tensor:
        return self.kernels.linear(x, self.panels, self.num_out, norm=_parts(before), is_gated=True)


def _parts(norm: Norm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


Linear = NativeLinear | PackedLinear | PlainLinear | QuantizedLinear


AnyLinear = nn.Linear | QuantizedLinear


def are_linear(modules: Seq[object]) -> bool:
    """Whether all are plain linear layers, or all are quantized ones."""
    kinds = {type(module) for module in modules}
    return kinds in ({nn.Linear}, {QuantizedLinear})


def weight_of(linear: AnyLinear) -> Weight:
    """The weight in its stored form."""
    if isinstance(linear, QuantizedLinear):
        return linear.quantized_weight
    return linear.weight.detach()


@dataclass(frozen=True, slots=True)
class Layout:
    """How weights are stored: for the fastest of `products`."""

    products: Products
    kernels: Kernels | None

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        shape = _shape(weight)
        self.products.note(shape)
        product = self.products.fastest(shape)
        if product is Product.OWN and self.kernels is not None:
            return NativeLinear(weight, bias, self.kernels)
        if product is Product.ONEDNN and isinstance(weight, Tensor):
            return PackedLinear(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def merged(self, linears: Seq[AnyLinear]) -> Linear:
        """One layer with the concatenated outputs; all are quantized or none is."""
        weight = _side_by_side([weight_of(linear) for linear in linears])
        if all(linear.bias is None for linear in linears):
            return self.linear(weight, None)
        biases: list[Tensor] = [
            torch.zeros(linear.out_features, dtype=weight.dtype)
            if linear.bias is None
            else linear.bias
            for linear in linears
        ]
        return self.linear(weight, torch.cat(biases))

    def gates(self, gate: AnyLinear, up: AnyLinear) -> NativeGates | None:
        """SiLU gates and values as one product, if ours is the fastest."""
        if self.kernels is None or gate.bias is not None or up.bias is not None:
            return None
        first, second = weight_of(gate), weight_of(up)
        both = dataclasses.replace(_shape(first), num_out=2 * first.shape[0])
        if not self.kernels.can_multiply(first):
            return None
        if self.products.fastest(both) is not Product.OWN:
            return None
        self.products.note(both)
        return NativeGates(first, second, self.kernels)


def _shape(weight: Weight) -> Shape:
    num_out, num_in = weight.shape
    return Shape(num_in, num_out, weight.dtype, isinstance(weight, QuantizedWeight))


def _side_by_side(weights: Seq[Weight]) -> Weight:
    small = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not small:
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    assert len(small) == len(weights)
    values = torch.cat([weight.values for weight in small])
    return QuantizedWeight(values, torch.cat([weight.scales for weight in small]), small[0].dtype)
