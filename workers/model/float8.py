"""Float8 weights, for GPUs whose tensor cores multiply them.

Each output of a linear layer has one scale, and so has each row of its inputs, which are rounded
at each call. The product is torch's, without scales: with one for each row cuBLAS was reported to
refuse some sizes. `quantization` replaces the layers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from workers.engine.model import ModelRefused
from workers.model.checkpoint import first_line

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# A smaller scale would have fewer digits. Rows of zeros have this one.
LEAST_SCALE = torch.finfo(torch.float32).tiny
_LEAST_CAPABILITY = 9  # compute capability of H100
_MULTIPLE = 16  # of both sizes of a layer, for torch's product on a GPU
# Of a product's largest number: its result is rounded to bfloat16 twice, and an input in a hundred
# may be rounded otherwise by a kernel that divides less exactly.
_TOLERANCE = 2**-6
_CHECKED_ROWS = (1, 17, 64, 256, 257)
_SLICE = 8192  # outputs whose weights are converted at a time
_rounds_inputs = True


def check_float8(dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """`capability`: compute capability of a CUDA device; None: a CPU. Raises ModelRefused."""
    if capability is None:
        raise ModelRefused("quantization fp8 needs a CUDA device; on a CPU use int8")
    if capability[0] < _LEAST_CAPABILITY:
        raise ModelRefused(
            f"quantization fp8 needs a device of compute capability {_LEAST_CAPABILITY} or more, "
            f"and this one has {capability[0]}.{capability[1]}; use none"
        )
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ModelRefused(f"quantization fp8 needs dtype bfloat16, not {name}")


def fits(linear: nn.Linear) -> bool:
    """Whether torch's product takes such a layer."""
    sizes = linear.in_features, linear.out_features
    return linear.weight.dtype == torch.bfloat16 and not any(size % _MULTIPLE for size in sizes)


def rounds_inputs() -> bool:
    return _rounds_inputs


@contextlib.contextmanager
def exact_inputs() -> Iterator[None]:
    """Meanwhile layers multiply inputs that are not rounded, so that two ways to compute a model
    can be compared: a difference of one digit would become one of many where it moves an input to
    the next float8 number. For one thread."""
    global _rounds_inputs  # a mode of the process, as torch's own are
    _rounds_inputs = False
    try:
        yield
    finally:
        _rounds_inputs = True


def float8_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix (n, in) -> values float8 (n, in), scales float32 (n, 1). The largest value of each
    row sets its scale."""
    largest = torch.linalg.vector_norm(matrix, math.inf, dim=1, keepdim=True, dtype=torch.float32)
    scales = (largest / LARGEST).clamp_(min=LEAST_SCALE)
    return (matrix / scales).to(FLOAT8), scales


def float8_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x (…, in), values float8 (out, in), scales float32 (out,) -> x @ weight.T (…, out)
    bfloat16."""
    rows, row_scales = _rounded(x.reshape(-1, x.shape[-1]))
    one = _one(x.device)
    tensor = ScalingType.TensorWise
    columns = values.t()  # column-major, as the product needs it
    out = F.scaled_mm(rows, columns, one, tensor, one, tensor, output_dtype=torch.bfloat16)
    return _scaled(out, row_scales, scales).view(*x.shape[:-1], len(values))


def exact_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """The same, in x's type, of inputs that are not rounded. Slow."""
    parts = [F.linear(x, part.to(x.dtype)) for part in torch.split(values, _SLICE)]
    return (torch.cat(parts, -1) * scales).to(x.dtype)


def wrong_product(values: Tensor, scales: Tensor) -> str | None:
    """Compares `float8_product` by a layer's weight with the same in float32, on random inputs of
    different sizes. None if it is right; else what is wrong."""
    generator = torch.Generator().manual_seed(0)
    most = 1024  # outputs that are compared: a head's weights in float32 would take much memory
    for num_rows in _CHECKED_ROWS:
        x = torch.randn(num_rows, values.shape[1], generator=generator)
        x *= torch.logspace(-3, 3, num_rows)[:, None]
        x = x.to(values.device, torch.bfloat16)
        try:
            found = float8_product(x, values, scales)[:, :most].float()
        except Exception as exc:  # torch and Triton's compiler may raise anything
            return f"{num_rows} rows raise {type(exc).__name__}: {first_line(exc)}"
        rows, row_scales = float8_rows(x)
        exact = (rows.float() * row_scales) @ (values[:most].float() * scales[:most, None]).T
        largest = exact.abs().amax(1).clamp(min=LEAST_SCALE)
        share = float(((found - exact).abs().amax(1) / largest).max())
        if not share <= _TOLERANCE:
            return f"{num_rows} rows are off by {share:.1e} of their largest number"
    return None


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`float8_rows`, on a GPU in one kernel."""
    if not matrix.is_cuda:
        return float8_rows(matrix)
    from workers.model.gpu.kernels import round_rows  # only where there is Triton

    return round_rows(matrix)


def _scaled(out: Tensor, row_scales: Tensor, scales: Tensor) -> Tensor:
    """out bfloat16 (n, out), which may be overwritten, times its rows' scales (n, 1) and its
    outputs' (out,)."""
    if not out.is_cuda:
        return (out * row_scales * scales).to(out.dtype)
    from workers.model.gpu.kernels import scale_rows

    return scale_rows(out, row_scales, scales)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
