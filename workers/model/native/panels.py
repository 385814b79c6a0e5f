"""The weight layout of our matrix product: panels of 64 outputs. Read by linear.h and widen.h."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.quantization import QuantizedWeight

PANEL = 64  # outputs computed at once
_HALF = PANEL // 2

Weight = Tensor | QuantizedWeight  # (out, in)


@dataclass(frozen=True, slots=True)
class Panels:
    """weights (num_panels, in, 64) in the product's type, or int8 with scales float32 (num_panels *
    64,)."""

    weights: Tensor
    scales: Tensor | None = None


def lay_out(weight: Weight, *, for_lookup: bool) -> Panels:
    """In a panel the weights of an input (in bfloat16: of a pair of inputs) are contiguous; the
    last panel is padded with zeros. for_lookup: order int8 weights for a library that
    `looks_up_bytes`."""
    num_inputs = 2 if weight.dtype == torch.bfloat16 else 1
    if not isinstance(weight, QuantizedWeight):
        return Panels(_panels(_filled(weight, PANEL), num_inputs))
    values, scales = _filled(weight.values, PANEL), _filled(weight.scales, PANEL)
    if num_inputs == 1:
        return Panels(_panels(values, 1), scales)
    if not for_lookup:
        return Panels(_panels(values, 2), scales)
    panels = _panels(_with_signs(values), 2)
    # Alternate 8 of one block of 32 with 8 of the next: the order of unpacklo and unpackhi.
    in_turns = panels.view(-1, 2, 4, 8).transpose(1, 2).contiguous()
    return Panels(in_turns.view(panels.shape), scales)


def lay_out_gated(gate: Weight, up: Weight, *, for_lookup: bool) -> Panels:
    """gate and up (out, in) -> panels that hold 32 outputs of gate and the same 32 of up."""
    if not isinstance(gate, QuantizedWeight):
        assert not isinstance(up, QuantizedWeight)
        return lay_out(_in_halves(gate, up), for_lookup=for_lookup)
    assert isinstance(up, QuantizedWeight)
    values = _in_halves(gate.values, up.values)
    scales = _in_halves(gate.scales, up.scales)
    return lay_out(QuantizedWeight(values, scales, gate.dtype), for_lookup=for_lookup)


def _filled(weight: Tensor, multiple: int) -> Tensor:
    """Pads the outputs with zeros to a multiple."""
    beside = (0, 0) * (weight.ndim - 1)
    return F.pad(weight, (*beside, 0, -len(weight) % multiple))


def _in_halves(gate: Tensor, up: Tensor) -> Tensor:
    """Interleaves gate and up in blocks of 32 outputs."""
    halves = [_filled(part, _HALF).view(-1, _HALF, *part.shape[1:]) for part in (gate, up)]
    return torch.cat(halves, dim=1).flatten(0, 1)


def _panels(weight: Tensor, num_inputs: int) -> Tensor:
    """(out, in) -> (num_panels, in, 64), of `num_inputs` inputs side by side."""
    num_in = weight.shape[1]
    panels = weight.view(-1, PANEL, num_in // num_inputs, num_inputs).transpose(1, 2)
    return panels.contiguous().view(-1, num_in, PANEL)


def _with_signs(values: Tensor) -> Tensor:
    """-127 … 127 -> magnitude in seven bits, sign in the eighth."""
    magnitudes = values.abs().view(torch.uint8)
    return (magnitudes | (values < 0).to(torch.uint8) << 7).view(torch.int8)
