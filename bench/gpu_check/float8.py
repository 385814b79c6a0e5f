"""Times a layer's products with float8 weights beside bfloat16 ones."""

import torch
import torch.nn.functional as F

from bench.gpu_check.machine import Machine
from bench.gpu_check.results import Finding
from bench.gpu_check.shapes import Shape
from workers.model.float8 import wrong_product
from workers.model.quantization import QuantizedLinear, rounded_to_float8


def has_float8(machine: Machine) -> bool:
    """Whether the device may be given such weights; tiny ones are tried on a CPU."""
    if machine.device.type != "cuda":
        return machine.is_tiny
    return torch.cuda.get_device_capability(machine.device)[0] >= 9


def check_product(machine: Machine, shape: Shape) -> Finding:
    """The product of the shape's widest layer, whose inputs are rounded by a kernel."""
    num_in, num_out = max(_products(shape), key=lambda sizes: sizes[1])
    small = rounded_to_float8(_weight(machine, num_in, num_out))
    wrong = wrong_product(small.values, small.scales)
    return Finding(wrong is None, wrong or "as in float32")


def time_products(machine: Machine, shape: Shape, num_rows: int) -> dict[str, float]:
    """Seconds of all merged products of a layer, with the rounding of their inputs."""
    times = {"bfloat16_s": 0.0, "fp8_s": 0.0}
    for num_in, num_out in _products(shape):
        weight = _weight(machine, num_in, num_out)
        small = QuantizedLinear(rounded_to_float8(weight), None)
        x = torch.randn(num_rows, num_in, device=machine.device).bfloat16()
        times["bfloat16_s"] += machine.seconds(lambda x=x, w=weight: F.linear(x, w))  # type: ignore[misc]
        times["fp8_s"] += machine.seconds(lambda x=x, small=small: small(x))  # type: ignore[misc]
    return times


def _products(shape: Shape) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's merged products."""
    numbers = shape.numbers
    hidden, inner = numbers["hidden_size"], numbers["intermediate_size"]
    num_heads = numbers["num_attention_heads"]
    dim = numbers.get("head_dim") or hidden // num_heads
    heads = num_heads + 2 * numbers["num_key_value_heads"]
    return [(hidden, heads * dim), (num_heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]


def _weight(machine: Machine, num_in: int, num_out: int) -> torch.Tensor:
    return torch.randn(num_out, num_in, device=machine.device).bfloat16()
