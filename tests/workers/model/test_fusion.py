"""Modules are exchanged if the replacement gives the same result, otherwise not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.model.fused import fused
from tests.workers.model.processors import ISAS, PROCESSORS
from workers.model.fusion.exchange import ATTENTION, LINEAR, MLP, NORM
from workers.model.linear import PackedLinear
from workers.model.matmul_choice import Processor, Product
from workers.model.native.library import Isa


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
def test_families_of_the_common_shape_are_merged(family: str, processor: Processor) -> None:
    """Including attention with norms of heads, windows and softcaps; every MLP and linear layer."""
    patient = fused(family, processor=processor)

    num_layers = patient.decoder.config.num_hidden_layers
    assert patient.num(ATTENTION) == patient.num(MLP) == num_layers
    assert not any(type(module) is nn.Linear for module in patient.decoder.modules())
    assert patient.done.refused == {}
    assert patient.num(NORM) >= 2 * num_layers + 1


@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_bfloat16_is_merged_too(isa: Isa) -> None:
    """Within its precision, also on processors without bfloat16 multiplication."""
    patient = fused("llama", torch.bfloat16, processor=Processor(isa, frozenset({Product.OWN})))

    assert set(patient.done.exchanged) == {ATTENTION, MLP, NORM, LINEAR}


def test_modules_that_only_look_alike_are_kept() -> None:
    """A norm that adds something, a gate that squares: the comparison finds them."""

    def spoil(decoder: Any) -> None:
        norm, mlp = decoder.model.norm, decoder.model.layers[0].mlp
        plain_norm, plain_mlp = norm.forward, mlp.forward
        norm.forward = lambda x: plain_norm(x) + 0.1
        mlp.forward = lambda x: plain_mlp(x).square()

    patient = fused("llama", spoil=spoil)

    decoder = patient.decoder
    first = decoder.model.layers[0].mlp
    assert type(decoder.model.norm).__name__ == "LlamaRMSNorm"
    assert type(first).__name__ == "LlamaMLP"
    assert type(first.gate_proj) is not nn.Linear
    assert patient.num(MLP) == decoder.config.num_hidden_layers - 1
    assert patient.done.refused == {NORM: ["model.norm"], MLP: ["model.layers.0.mlp"]}


def test_modules_with_hooks_are_kept() -> None:
    """A hook does more than the forward shows."""

    def spoil(decoder: Any) -> None:
        attention = decoder.model.layers[0].self_attn
        attention.register_forward_pre_hook(lambda module, args: None)

    patient = fused("llama", spoil=spoil)

    decoder = patient.decoder
    assert type(decoder.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert patient.num(ATTENTION) == decoder.config.num_hidden_layers - 1


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_packed_layer_is_the_linear_layer(num_rows: int, has_bias: bool) -> None:
    """For fewer and more rows than the layout was chosen for."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=has_bias).requires_grad_(False)
    x: Tensor = torch.randn(1, num_rows, 48)

    found = PackedLinear(plain.weight, plain.bias)(x)

    torch.testing.assert_close(found, plain(x), rtol=1e-4, atol=1e-5)
