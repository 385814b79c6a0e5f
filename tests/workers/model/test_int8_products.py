"""The int8 kernel, compared with widened weights in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.workers.model.processors import ISAS
from tests.workers.model.test_native import assert_close
from workers.model.native.kernels import Kernels
from workers.model.native.library import Isa, load_library
from workers.model.quantization import QuantizedLinear, QuantizedWeight, rounded


@pytest.fixture(params=ISAS, ids=str)
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def kernels(isa: Isa, request: pytest.FixtureRequest) -> Kernels:
    return Kernels(load_library(isa), request.param)


def make_weight(kernels: Kernels, num_out: int, num_in: int) -> QuantizedWeight:
    """Scales differ widely between outputs."""
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in) * torch.linspace(0.01, 1.0, num_out)[:, None]
    return rounded(weight.to(kernels.dtype))


def exact(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    values: torch.Tensor = x.double() @ weight.values.double().T
    return values * weight.scales.double()


@pytest.mark.each_value
def test_every_byte_is_made_wide_exactly(kernels: Kernels) -> None:
    """All of -127 … 127 at every place of a panel, by rows of x that select one input each."""
    num_in = 256
    numbers = torch.arange(64)[:, None] * 5 + torch.arange(num_in)[None] * 3
    values = (numbers % 255 - 127).to(torch.int8)
    assert len(set(values.flatten().tolist())) == 255
    weight = make_weight(kernels, 64, num_in)
    weight = QuantizedWeight(values, torch.ones(64), kernels.dtype)
    one_each = torch.eye(num_in).to(kernels.dtype)

    found = kernels.linear(one_each, kernels.lay_out(weight), 64)

    assert torch.equal(found, values.T.to(kernels.dtype))


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 64), (96, 16), (48, 272), (16, 1040)])
@pytest.mark.each_pair
def test_the_product_is_that_of_the_widened_weights(
    num_in: int, num_out: int, kernels: Kernels
) -> None:
    """For whole and partial panels, one block of rows and more, with and without an addend, on a
    part of a row."""
    weight, dtype = make_weight(kernels, num_out, num_in), kernels.dtype
    panels = kernels.lay_out(weight)
    assert panels.weights.dtype == torch.int8
    for num_rows in (0, 1, 5, 6, 7, 9, 10, 11, 13, 100):
        x = torch.randn(num_rows, num_in + 32).to(dtype)[:, :num_in]
        to = torch.randn(num_rows, num_out).to(dtype)

        assert_close(kernels.linear(x, panels, num_out), exact(x, weight).to(dtype))
        assert_close(kernels.linear(x, panels, num_out, to), (exact(x, weight) + to).to(dtype))


@pytest.mark.parametrize("num_rows", [1, 7, 100])
@pytest.mark.parametrize("num_out", [32, 48, 256])
@pytest.mark.each_pair
def test_gates_and_a_norm_are_fused_into_the_product(
    num_out: int, num_rows: int, kernels: Kernels
) -> None:
    """Each half of a panel has its own scales."""
    gate, up = (make_weight(kernels, num_out, 96) for _ in range(2))
    up = QuantizedWeight(up.values.flip(0), up.scales.flip(0), up.dtype)
    x, norm = torch.randn(num_rows, 96).to(kernels.dtype), torch.randn(96).to(kernels.dtype)
    normed = kernels.rms_norm(x, norm, 1e-5)
    expected = F.silu(exact(normed, gate)) * exact(normed, up)
    panels = kernels.lay_out_gated(gate, up)

    found = kernels.linear(x, panels, num_out, norm=(norm, 1e-5), is_gated=True)

    assert_close(found, expected.to(kernels.dtype))


def test_a_row_s_product_does_not_depend_on_its_neighbours(kernels: Kernels) -> None:
    """Bit for bit, although with many rows the panel is widened once and kept."""
    weight = make_weight(kernels, 320, 192)
    x = torch.randn(100, 192).to(kernels.dtype)
    panels = kernels.lay_out(weight)
    together = kernels.linear(x, panels, 320)

    for num_rows in range(1, 14):
        assert torch.equal(kernels.linear(x[:num_rows], panels, 320), together[:num_rows])


def test_a_wider_product_may_follow_a_narrower_one(kernels: Kernels) -> None:
    """The buffer of a panel grows."""
    for num_in in (16, 4096, 32):
        weight = make_weight(kernels, 80, num_in)
        x = torch.randn(9, num_in).to(kernels.dtype) / num_in**0.5
        found = kernels.linear(x, kernels.lay_out(weight), 80)
        assert_close(found, exact(x, weight).to(kernels.dtype))


def test_torch_and_the_kernel_agree(kernels: Kernels) -> None:
    """The result without a compiler differs only by rounding."""
    weight = make_weight(kernels, 256, 512)
    x = torch.randn(20, 512).to(kernels.dtype)

    found = kernels.linear(x, kernels.lay_out(weight), 256)

    assert_close(found / 10, QuantizedLinear(weight, None)(x) / 10)
