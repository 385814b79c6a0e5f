"""int8 weights: their error, which families support them, and tokens equal to those of a decoder
with weights rounded alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny_families import VOCAB_SIZE
from tests.tiny_models import make_model, save_tiny_model
from tests.workers.model.driver import make_prompts, make_sequence, run_to_end
from tests.workers.model.loading import load
from tests.workers.model.parity import NUM_OUTPUT, Expected
from tests.workers.model.processors import PROCESSORS
from workers.model.linear import NativeRMSNorm
from workers.model.loader import ModelRefused
from workers.model.matmul_choice import Processor, Product
from workers.model.quantization import (
    QuantizedLinear,
    check_quantization,
    num_weight_bytes,
    quantize,
    rounded,
)

# Biases, tied and capped heads, norms of heads, windows; the last two run sequence by sequence.
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "cohere", "bloom", "mamba2"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def test_a_weight_is_off_by_half_of_its_row_s_scale_at_most() -> None:
    """The largest of a row is kept; a row of zeros stays zero; rows do not affect each other."""
    weight = torch.randn(6, 40) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]

    small = rounded(weight)

    assert small.values.dtype == torch.int8
    assert small.values.abs().amax(dim=1).tolist() == [127] * 5 + [0]
    off = (small.widened() - weight).abs().amax(dim=1)
    assert (off <= 0.5001 * weight.abs().amax(dim=1) / 127).all()
    assert small.nbytes == weight.numel() + 4 * len(weight)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_torch_s_product_is_that_of_the_widened_weights(dtype: torch.dtype, has_bias: bool) -> None:
    """In each type: after a norm, with a bias and with an addend."""
    plain = nn.Linear(48, 80, bias=has_bias).requires_grad_(False).to(dtype)
    small = QuantizedLinear(rounded(plain.weight), plain.bias)
    x, to = torch.randn(5, 48).to(dtype), torch.randn(5, 80).to(dtype)
    exact = x.double() @ (small.values * small.scales[:, None]).double().T
    if has_bias:
        exact += plain.bias
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)

    assert_close(small(x), exact)
    assert_close(small.add(x, to), exact + to)

    class Doubling:
        weight, eps = torch.ones(48), 0.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    if not has_bias:
        assert_close(small(x, Doubling()), 2 * exact)


WAYS = ["kernels", "torch in merged modules", "torch only"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.each_value
def test_tokens_are_those_of_transformers_with_weights_rounded_alike(
    family: str, way: str, tmp_path: Path
) -> None:
    """Greedy, in a batch and in chunks, by our kernel and by torch."""
    processor = Processor(products=frozenset()) if way == "torch in merged modules" else None
    folder = save_tiny_model(family, tmp_path)
    own: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for module in own.modules():
            if type(module) is nn.Linear:  # also a head that shares the embedding's weight
                module.weight = nn.Parameter(rounded(module.weight).widened())
    expected = Expected(own, make_prompts([1, 17, 40], VOCAB_SIZE))

    model = load(folder, processor=processor, fused=way != "torch only", quantization="int8").model

    sequences = [make_sequence(p, max_tokens=NUM_OUTPUT) for p in expected.prompts]
    for number, found in enumerate(run_to_end(model, sequences, 13)):
        expected.check(number, found)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "falcon"])
def test_a_decoder_of_other_layers_is_refused(family: str, tmp_path: Path) -> None:
    """One sentence that names the option; little of the model would become smaller."""
    with pytest.raises(ModelRefused, match=r"^quantization int8 .* matrices elsewhere$"):
        load(save_tiny_model(family, tmp_path), quantization="int8")


def test_unknown_types_and_non_finite_weights_are_refused(tmp_path: Path) -> None:
    """Each in one sentence, before a job is accepted."""
    folder = save_tiny_model("llama", tmp_path)
    with pytest.raises(ModelRefused, match=r"quantization fp8 is not one of none, int8$"):
        load(folder, quantization="fp8")

    decoder = make_model("llama").requires_grad_(False)
    decoder.model.layers[1].mlp.up_proj.weight[3, 5] = float("inf")
    with pytest.raises(ModelRefused, match=r"not all weights of model\.layers\.1\.mlp\.up_proj"):
        quantize(decoder)


def test_int8_is_refused_on_a_gpu() -> None:
    """There it would be slower than bfloat16. Other values are taken."""
    gpu = torch.device("cuda")
    with pytest.raises(ModelRefused, match=r"int8 is for CPUs: .* use quantization none$"):
        check_quantization("int8", gpu)

    check_quantization("none", gpu)
    check_quantization("int8", torch.device("cpu"))


def test_int8_leaves_a_quarter_of_the_bytes_and_logs_it(tmp_path: Path) -> None:
    """Embeddings and norms are unchanged. By default nothing is rounded."""
    folder, lines = save_tiny_model("llama", tmp_path), list[str]()

    load(folder, lines, quantization="int8")

    decoder = make_model("llama").requires_grad_(False)
    linears = [module for module in decoder.modules() if type(module) is nn.Linear]
    rest = num_weight_bytes(decoder, "cpu") - sum(linear.weight.nbytes for linear in linears)
    assert any(
        line.startswith(f"weights of {len(linears)} linear layers are int8") for line in lines
    )
    quantize(decoder)
    num_rounded = sum(linear.weight.numel() + 4 * linear.out_features for linear in linears)
    assert num_weight_bytes(decoder, "cpu") == num_rounded + rest
    lines.clear()
    load(folder, lines, quantization="none")
    assert not any(line.startswith("weights of") for line in lines)


def test_an_embedding_tied_to_the_head_is_not_rounded() -> None:
    """The head has its own rounded copy."""
    decoder = make_model("llama", tie_word_embeddings=True).requires_grad_(False)
    before = decoder.model.embed_tokens.weight.clone()
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight

    quantize(decoder)

    assert torch.equal(decoder.model.embed_tokens.weight, before)
    assert torch.equal(decoder.lm_head.values, rounded(before).values)


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_rounded_modules_are_merged_like_others(processor: Processor, tmp_path: Path) -> None:
    """One product for queries, keys and values, and the layers in one loop."""
    folder = save_tiny_model("llama", tmp_path, **WIDE)
    runner: Any = load(folder, processor=processor, quantization="int8").model

    decoder = runner._decoder
    assert runner.stack is not None
    assert isinstance(decoder.model.norm, NativeRMSNorm)
    qkv = decoder.model.layers[0].self_attn.qkv
    if Product.OWN in processor.products:
        assert qkv.panels.weights.dtype == torch.int8
        assert runner.stack._native is not None
    else:
        assert qkv.values.shape == (4 * 32, 64)


WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
