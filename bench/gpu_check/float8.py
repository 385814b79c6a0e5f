"""Times a layer's products with float8 weights beside bfloat16 ones."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_check.machine import Machine
from bench.gpu_check.results import Finding
from bench.gpu_check.shapes import Shape
from workers.model.float8 import wrong_product
from workers.model.gpu.graphs import CudaRecorder
from workers.model.quantization import QuantizedLinear, rounded_to_float8

# Of each product, so that none is read from the device's cache.
_NUM_LAYERS = 4


def has_float8(machine: Machine) -> bool:
    """Whether the device may be given such weights; tiny ones are tried on a CPU."""
    if machine.device.type != "cuda":
        return machine.is_tiny
    return torch.cuda.get_device_capability(machine.device)[0] >= 9


def check_products(machine: Machine, shape: Shape) -> Finding:
    """Each of the shape's products, whose inputs are rounded by a kernel."""
    for num_in, num_out in _products(shape):
        small = rounded_to_float8(_weight(machine, num_in, num_out))
        if wrong := wrong_product(small.values, small.scales):
            return Finding(False, f"{num_in} inputs and {num_out} outputs: {wrong}")
    return Finding(True, "as in float32")


def time_products(machine: Machine, shape: Shape, num_rows: int) -> dict[str, float]:
    """Seconds of all merged products of a layer, with the rounding of their inputs; on a GPU as a
    graph, as they are served."""
    plain, small = list[Callable[[], Tensor]](), list[Callable[[], Tensor]]()
    for num_in, num_out in _products(shape) * _NUM_LAYERS:
        weight = _weight(machine, num_in, num_out)
        linear = QuantizedLinear(rounded_to_float8(weight), None)
        x = torch.randn(num_rows, num_in, device=machine.device).bfloat16()
        plain.append(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
        small.append(lambda x=x, linear=linear: linear(x))  # type: ignore[misc]
    return {"bfloat16_s": _seconds(machine, plain), "fp8_s": _seconds(machine, small)}


def _seconds(machine: Machine, products: list[Callable[[], Tensor]]) -> float:
    """Of one layer."""

    def compute() -> None:
        for product in products:
            product()

    compute()
    if machine.device.type == "cuda":
        return machine.seconds(CudaRecorder()(compute).replay) / _NUM_LAYERS
    return machine.seconds(compute) / _NUM_LAYERS


def _products(shape: Shape) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's merged products."""
    numbers = shape.numbers
    hidden, inner = numbers["hidden_size"], numbers["intermediate_size"]
    num_heads = numbers["num_attention_heads"]
    dim = numbers.get("head_dim") or hidden // num_heads
    heads = num_heads + 2 * numbers["num_key_value_heads"]
    return [(hidden, heads * dim), (num_heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]


def _weight(machine: Machine, num_in: int, num_out: int) -> Tensor:
    return torch.randn(num_out, num_in, device=machine.device).bfloat16()
