"""Linear layers, several in one where they take the same input.

On a CPU oneDNN lays their weights out for its own matrix product, once, at load: torch's default
float32 product goes another way, which is half as fast on processors that are not Intel's, and
lays bfloat16 weights out anew at each call.
"""

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows that the layout is chosen for: a step of a few dozen streams.
_EXPECTED_ROWS = 32


class PackedLinear(nn.Module):
    """x (…, in) -> x @ weight.T + bias (…, out)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        plain = weight.detach().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain, _EXPECTED_ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Inference alone: there is no gradient."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out) -> to + forward(x), rounded once."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, to, self._packed, self._bias, "add"
        )
        return out


class PlainLinear(nn.Module):
    """x (…, in) -> x @ weight.T + bias (…, out), as torch does it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Inference alone: there is no gradient."""
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """x (T, in), to (T, out) -> to + forward(x)."""
        if self._bias is not None:
            to = to + self._bias
        return torch.addmm(to, x, self._weight.T)


Linear = PackedLinear | PlainLinear


def lay_out(weight: Tensor, bias: Tensor | None, *, packs: bool) -> Linear:
    """A linear layer for the device; `packs` for a CPU."""
    return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch and this processor have the packed product for the type."""
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return torch._C._has_mkldnn and weight.dtype in (torch.float32, torch.bfloat16)


def merged(linears: Seq[nn.Linear], *, packs: bool) -> Linear:
    """One layer whose output is theirs, side by side."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight = torch.cat(weights)
    if all(linear.bias is None for linear in linears):
        return lay_out(weight, None, packs=packs)
    biases: list[Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return lay_out(weight, torch.cat(biases), packs=packs)
