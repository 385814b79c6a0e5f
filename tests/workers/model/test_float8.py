"""float8 weights: their error, torch's product on a CPU, merged modules, the checks at load, and
who is refused. Where there is a GPU of capability 9, the tests of products run there too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_mm

from tests.tiny_models import make_model, save_tiny_model
from tests.workers.model.driver import allot_blocks, make_sequence
from tests.workers.model.operating import BLOCK_SIZE, operated
from workers.engine.model import Chunk, ModelRefused
from workers.ipc.messages import EngineOptions
from workers.model.backend import choose_backend
from workers.model.float8 import FLOAT8, exact_inputs, fits, float8_rows, wrong_product
from workers.model.gpu.ahead_runner import AheadRunner
from workers.model.loader import load_model
from workers.model.proof import difference
from workers.model.quantization import (
    QuantizedLinear,
    check_quantization,
    num_weight_bytes,
    quantize,
    rounded_to_float8,
)
from workers.model.surgery.blocks import MergedAttention, MergedMLP
from workers.model.surgery.surgeon import ATTENTION, MLP

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES = [CPU]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9:
    DEVICES.append(CUDA)


def test_a_value_is_off_by_a_sixteenth_at_most() -> None:
    """Of itself, or by the smallest step of its row; rows of zeros, and of the smallest numbers,
    stay finite."""
    sizes = torch.tensor([1e-38, 1e-6, 1.0, 1e6, 3e38, 0.0])[:, None]
    matrix = torch.randn(6, 64).clamp(-1, 1) * sizes

    values, scales = float8_rows(matrix)

    assert (values.dtype, scales.shape) == (FLOAT8, (6, 1))
    assert values.float().abs().amax(dim=1)[1:].tolist() == [448.0] * 4 + [0.0]
    off = (values.double() * scales - matrix.double()).abs()
    assert (off <= (matrix.double().abs() / 16).clamp(min=2**-10 * scales)).all()


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_product_is_that_of_the_rounded_numbers(
    device: torch.device, num_rows: int, has_bias: bool
) -> None:
    """With rows of different sizes, and in three dimensions."""
    plain = nn.Linear(48, 80, bias=has_bias).requires_grad_(False).to(device, torch.bfloat16)
    small = QuantizedLinear(rounded_to_float8(plain.weight), plain.bias)
    x = torch.randn(num_rows, 48) * torch.logspace(-3, 3, num_rows)[:, None]
    x = x.to(device, torch.bfloat16)
    rows, scales = float8_rows(x)
    product = (rows.double() * scales) @ (small.values.double() * small.scales[:, None]).T
    bias = 0 if plain.bias is None else plain.bias.double()

    found = small(x)

    assert found.dtype == torch.bfloat16
    # bfloat16 rounds the product, its scale and the sum, each by at most 2**-8.
    largest = (product.abs() + abs(bias)).amax(dim=1, keepdim=True)
    off = (found.double() - product - bias).abs()
    assert (off <= (2 + has_bias) * 2**-8 * largest).all()
    assert torch.equal(small(x[None])[0], found)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Its scale is its own."""
    small = QuantizedLinear(rounded_to_float8(torch.randn(80, 48).bfloat16()), None)
    x = torch.randn(4, 48).bfloat16()
    beside = torch.cat([x[:1], 1e4 * x[1:]])

    torch.testing.assert_close(small(beside)[:1], small(x)[:1])
    assert wrong_product(small.values, small.scales) is None


def to_float8(decoder: nn.Module) -> None:
    quantize(decoder, "fp8")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_float8_modules_are_merged(family: str) -> None:
    """One product for queries, keys and values, so that their input is rounded once."""
    backend = choose_backend("torch", torch.bfloat16, CPU, BLOCK_SIZE, print, fused=False)

    with exact_inputs():
        patient = operated(family, torch.bfloat16, backend=backend, spoil=to_float8)

    first: Any = patient.decoder.model.layers[0]
    num_layers = patient.decoder.config.num_hidden_layers
    assert patient.num(ATTENTION) == patient.num(MLP) == num_layers
    assert isinstance(first.self_attn, MergedAttention)
    assert isinstance(first.mlp, MergedMLP)
    for linear in (first.self_attn.qkv, first.mlp.gate_up, first.mlp.down_proj):
        assert isinstance(linear, QuantizedLinear)
        assert linear.values.dtype == FLOAT8
    with exact_inputs():
        assert difference(patient.runner, patient.decoder, patient.untouched) is None


def test_layers_of_other_sizes_and_types_stay() -> None:
    """Torch's product takes multiples of 16, and layers kept in float32 are so for a reason."""
    decoder: Any = make_model("llama", vocab_size=250, tie_word_embeddings=False)
    decoder.requires_grad_(False).to(torch.bfloat16)
    decoder.model.layers[0].mlp.up_proj.to(torch.float32)
    before = num_weight_bytes(decoder, "cpu")

    line = quantize(decoder, "fp8")

    small = [module for module in decoder.modules() if isinstance(module, QuantizedLinear)]
    assert type(decoder.lm_head) is nn.Linear
    assert type(decoder.model.layers[0].mlp.up_proj) is nn.Linear
    assert line.startswith(f"weights of {len(small)} linear layers are fp8: ")
    saved = sum(module.values.numel() - 4 * module.out_features for module in small)
    assert num_weight_bytes(decoder, "cpu") == before - saved
    odd: Any = make_model("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ModelRefused, match=r"fp8 is for linear layers of sizes .* elsewhere"):
        quantize(odd.to(torch.bfloat16), "fp8")
    assert not fits(nn.Linear(24, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "reason"),
    [
        ("int8", CUDA, torch.bfloat16, (9, 0), r"int8 is for CPUs: .* longer .*; use fp8 on"),
        ("fp8", CUDA, torch.bfloat16, (8, 9), "capability 9 or more, and this one has 8.9"),
        ("fp8", CUDA, torch.float16, (9, 0), "fp8 needs dtype bfloat16, not float16"),
        ("fp8", CPU, torch.bfloat16, None, "fp8 needs a CUDA device; on a CPU use int8"),
        ("int8", CPU, torch.float16, None, None),
        ("fp8", CUDA, torch.bfloat16, (9, 0), None),
        ("fp8", CUDA, torch.bfloat16, (10, 0), None),
        ("none", CUDA, torch.float16, (7, 5), None),
    ],
)
def test_a_device_gets_only_what_it_multiplies_fast(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    reason: str | None,
) -> None:
    """Others are refused in one sentence that says what to use."""

    def check() -> None:
        check_quantization(name, device, dtype, lambda _: capability or (0, 0))

    if reason is None:
        check()
        return
    with pytest.raises(ModelRefused, match=reason):
        check()


def test_the_checks_at_load_round_no_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a right module may seem wrong, as a small difference grows where it moves an input to
    the next float8 number. What is served rounds them."""
    monkeypatch.setattr("workers.model.loader.check_quantization", lambda *_: None)

    class Rounded(Exception):
        pass

    def rounded(*_: object) -> None:
        raise Rounded

    monkeypatch.setattr("workers.model.quantization.float8_product", rounded)
    options = EngineOptions(
        model_path=str(save_tiny_model("llama", tmp_path)),
        device="cpu",
        dtype="bfloat16",
        quantization="fp8",
        steps="ahead",
        fused=False,
    )

    model = load_model(options, lambda text: None).model

    assert isinstance(model, AheadRunner)
    [sequence] = sequences = [make_sequence([4, 5, 6])]
    allot_blocks(sequences, model)
    with pytest.raises(Rounded):
        model.run([Chunk(sequence, 0, 3, samples=True)])


def test_exact_inputs_meet_the_same_weights() -> None:
    """Only the inputs are not rounded."""
    small = QuantizedLinear(rounded_to_float8(torch.randn(80, 48).bfloat16()), None)
    x = torch.randn(5, 48).bfloat16()

    with exact_inputs():
        found = small(x)

    exact = x.float() @ (small.values.float() * small.scales[:, None]).T
    torch.testing.assert_close(found.float(), exact, atol=0.1, rtol=2**-7)
    assert not torch.equal(small(x), found)


def _raises(rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    if len(rows) == 256:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling …")
    return scaled_mm(rows, *_, **__)


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (lambda *a, **b: 1.1 * scaled_mm(*a, **b), r"1 rows are off by 9\.\de-02 of their largest"),
        (lambda *a, **b: 0 * scaled_mm(*a, **b) / 0, r"1 rows are off by nan of their largest"),
        (_raises, r"256 rows raise RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED; use "),
    ],
    ids=["other numbers", "no numbers", "an error"],
)
def test_a_device_whose_product_fails_is_refused(
    product: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes of the layer."""
    monkeypatch.setattr("workers.model.loader.check_quantization", lambda *_: None)
    monkeypatch.setattr("workers.model.float8.F.scaled_mm", product)
    folder = str(save_tiny_model("llama", tmp_path))
    options = EngineOptions(
        model_path=folder, device="cpu", dtype="bfloat16", quantization="fp8", fused=False
    )

    with pytest.raises(
        ModelRefused, match=rf"with \d+ inputs and \d+ outputs fails here: {reason}"
    ):
        load_model(options, lambda text: None)


def test_zeros_and_broken_rows() -> None:
    """Weights of zeros are right, an empty step has no rows, and a row without finite numbers has
    none in its product and leaves the others theirs."""
    nothing = rounded_to_float8(torch.zeros(32, 48).bfloat16())
    assert wrong_product(nothing.values, nothing.scales) is None
    small = QuantizedLinear(rounded_to_float8(torch.randn(32, 48).bfloat16()), None)
    assert small(torch.zeros(0, 48).bfloat16()).shape == (0, 32)
    x = torch.randn(3, 48).bfloat16()
    alone = small(x[1:2])

    x[0, 5], x[2, 7] = float("nan"), float("inf")

    found = small(x)
    assert not found[[0, 2]].isfinite().any()
    torch.testing.assert_close(found[1:2], alone)


@pytest.mark.parametrize("dim", [16, 48, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_rounds_rows_too(dtype: torch.dtype, dim: int) -> None:
    """In one tile of a row, and in several. Triton's interpreter loses the carry where a number is
    rounded up to a power of two."""
    kernels = pytest.importorskip("workers.model.gpu.kernels")
    device = DEVICES[-1]
    sizes = torch.tensor([1.0, 0.0, 1e-30, 3e4])[:, None]
    matrix = (torch.randn(4, dim) * sizes).to(device, dtype)

    values, scales = kernels.round_rows(matrix)

    by_torch, expected_scales = float8_rows(matrix)
    torch.testing.assert_close(scales, expected_scales)
    off = (values.double() * scales - matrix.double()).abs()
    is_right = off <= (matrix.double().abs() / 15.9).clamp(min=2**-9.9 * scales.double())
    is_power = torch.frexp(by_torch.float()).mantissa.abs() == 0.5
    lost_its_carry = is_power & (2 * values.float() == by_torch.float())
    assert (is_right | (lost_its_carry & (device.type == "cpu"))).all()


@pytest.mark.parametrize("dim", [16, 48, 5000])
def test_the_kernel_scales_rows_and_outputs(dim: int) -> None:
    """In place, in one tile of a row, and in several."""
    kernels = pytest.importorskip("workers.model.gpu.kernels")
    matrix, scales = torch.randn(3, dim).bfloat16(), torch.rand(dim)
    row_scales = torch.tensor([[1.0], [1e-6], [3e4]])
    expected = (matrix * row_scales * scales).bfloat16()

    found = kernels.scale_rows(*(each.to(DEVICES[-1]) for each in (matrix, row_scales, scales)))

    torch.testing.assert_close(found.cpu(), expected)


def test_the_loader_refuses_it_on_a_cpu(tmp_path: Path) -> None:
    """Before it reads the weights."""
    folder, lines = save_tiny_model("llama", tmp_path), list[str]()
    options = EngineOptions(
        model_path=str(folder), device="cpu", dtype="bfloat16", quantization="fp8"
    )

    with pytest.raises(ModelRefused, match="fp8 needs a CUDA device"):
        load_model(options, lines.append)

    assert lines == []
