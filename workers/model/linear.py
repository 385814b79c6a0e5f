"""Linear layers, each by one product, and the norm before them; `matmul_choice` chooses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.native.kernels import Kernels, Weight
from workers.model.quantization import Norm


class NativeRMSNorm(nn.Module):
    """x / rms(x) * weight, by our kernel."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.eps, self._kernels = weight, eps, kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps)


def pack(weight: Tensor) -> Tensor:
    """Converts weight (out, in) to oneDNN's layout for a few dozen rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 32)
    return packed


def multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x (…, in) @ weight.T + bias -> (…, out)."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


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
