"""Modules are exchanged where the replacement gives the same, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import make_config, make_model
from tests.workers.model.processors import ISAS, PROCESSORS
from workers.model.attention.interface import ATTENTION_NAME, register_attention
from workers.model.backend import choose_backend
from workers.model.native.library import Isa
from workers.model.probe import probe_layers
from workers.model.processor import Processor, Product
from workers.model.surgery.linear import NativeLinear, PackedLinear
from workers.model.surgery.surgeon import Operation, operate

CPU = torch.device("cpu")


def exchanged(
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    processor: Processor | None = None,
    spoil: Callable[[Any], None] | None = None,
) -> tuple[Any, Operation]:
    """A tiny decoder with heads that the kernels take, after the operation."""
    register_attention()
    decoder = make_model(family, **wide(family)).to(dtype)
    decoder.set_attn_implementation(ATTENTION_NAME)
    shapes = probe_layers(decoder, decoder.config, CPU)
    if spoil is not None:
        spoil(decoder)
    backend = choose_backend(
        "auto", dtype, CPU, 16, lambda text: None, fused=True, processor=processor
    )
    return decoder, operate(decoder, shapes, backend)


def wide(family: str) -> dict[str, int]:
    """Two heads of 32."""
    has_head_dim = getattr(make_config(family), "head_dim", None) is not None
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return sizes | ({"head_dim": 32} if has_head_dim else {})


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
def test_families_of_the_common_shape_are_merged(family: str, processor: Processor) -> None:
    """Attention with norms of heads, windows and softcaps among them; every MLP and linear."""
    decoder, done = exchanged(family, processor=processor)

    num_layers = decoder.config.num_hidden_layers
    assert done.counts["attention layers"] == len(done.attentions) == num_layers
    assert done.counts["gated MLPs"] == num_layers
    assert not any(type(module) is nn.Linear for module in decoder.modules())
    assert done.counts["norms"] >= 2 * num_layers + 1


@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_bfloat16_is_merged_too(isa: Isa) -> None:
    """Within its own precision, also where the processor does not multiply bfloat16 numbers."""
    processor = Processor(isa, frozenset({Product.OWN}))
    _, done = exchanged("llama", torch.bfloat16, processor=processor)

    assert set(done.counts) == {"attention layers", "gated MLPs", "norms", "other linear layers"}


def test_what_only_looks_alike_stays() -> None:
    """A norm that adds something, a gate that squares: the comparison shows it."""

    def spoil(decoder: Any) -> None:
        norm, mlp = decoder.model.norm, decoder.model.layers[0].mlp
        plain_norm, plain_mlp = norm.forward, mlp.forward
        norm.forward = lambda x: plain_norm(x) + 0.1
        mlp.forward = lambda x: plain_mlp(x).square()

    decoder, done = exchanged("llama", spoil=spoil)

    assert type(decoder.model.norm).__name__ == "LlamaRMSNorm"
    first = decoder.model.layers[0].mlp
    assert type(first).__name__ == "LlamaMLP"
    assert isinstance(first.gate_proj, NativeLinear | PackedLinear)
    assert done.counts["gated MLPs"] == decoder.config.num_hidden_layers - 1


def test_what_has_hooks_stays() -> None:
    """It does more than its forward says."""

    def spoil(decoder: Any) -> None:
        attention = decoder.model.layers[0].self_attn
        attention.register_forward_pre_hook(lambda module, args: None)

    decoder, done = exchanged("llama", spoil=spoil)

    assert type(decoder.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert done.counts["attention layers"] == decoder.config.num_hidden_layers - 1


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_packed_layer_is_the_linear_layer(num_rows: int, has_bias: bool) -> None:
    """For fewer and more rows than the layout was chosen for."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=has_bias).requires_grad_(False)
    x: Tensor = torch.randn(1, num_rows, 48)

    found = PackedLinear(plain.weight, plain.bias)(x)

    torch.testing.assert_close(found, plain(x), rtol=1e-4, atol=1e-5)
