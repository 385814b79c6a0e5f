"""Modules are exchanged for a GPU if the replacement gives the same result, as for a CPU."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marks import LONG
from tests.workers.model.operating import BLOCK_SIZE, Patient, operated
from tests.workers.model.test_triton_attention import DEVICE
from workers.model.attention.packed import PackedAttention
from workers.model.backend import choose_backend
from workers.model.proof import difference
from workers.model.quantization import QuantizedLinear
from workers.model.surgery.surgeon import ATTENTION, MLP, NORM

pytest.importorskip("triton")

pytestmark = pytest.mark.campaign  # Triton's interpreter is slow

# Triton's interpreter is slow.


def exchanged(family: str, dtype: torch.dtype, **changes: Any) -> Patient:
    """A tiny decoder whose modules were exchanged for a GPU. Their attention is torch's, since
    other tests show Triton's, and its interpreter is slow."""
    backend = choose_backend("triton", dtype, DEVICE, BLOCK_SIZE, print, fused=True)
    backend = dataclasses.replace(backend, attention=PackedAttention())
    return operated(family, dtype, backend=backend, device=DEVICE, num_streams=2, **changes)


def _spoil(decoder: Any) -> None:
    """Changes the last norm (adds something), the first layer's gate (squares) and its queries
    (scales)."""
    norm, first = decoder.model.norm, decoder.model.layers[0]
    plain_norm, plain_mlp, plain_query = norm.forward, first.mlp.forward, first.self_attn.forward
    norm.forward = lambda x: plain_norm(x) + 0.1
    first.mlp.forward = lambda x: plain_mlp(x).square()

    def doubled(hidden_states: Tensor, **kwargs: Any) -> Any:
        return plain_query(hidden_states=hidden_states * 2, **kwargs)

    first.self_attn.forward = doubled


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama", torch.float32, marks=LONG),
        pytest.param("llama", torch.float16, marks=LONG),
        pytest.param("llama", torch.bfloat16, marks=LONG),
        ("mistral", torch.float32),
        pytest.param("qwen3", torch.bfloat16, marks=LONG),
        ("gemma2", torch.bfloat16),
    ],
)
def test_families_of_the_common_shape_are_merged(family: str, dtype: torch.dtype) -> None:
    """Attention, gated MLPs and norms; the other linear layers stay torch's own."""
    patient = exchanged(family, dtype)

    decoder, num_layers = patient.decoder, patient.decoder.config.num_hidden_layers
    assert patient.num(ATTENTION) == patient.num(MLP) == num_layers
    assert patient.num(NORM) >= 2 * num_layers + 1
    assert difference(patient.runner, decoder, patient.untouched) is None
    linears = [name for name, m in decoder.named_modules() if type(m) is nn.Linear]
    assert linears == ["lm_head"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=LONG)]
)
def test_rounded_weights_are_merged_too(dtype: torch.dtype) -> None:
    """They stay int8, also in the other linear layers."""
    patient = exchanged("qwen3", dtype, is_int8=True)

    decoder, num_layers = patient.decoder, patient.decoder.config.num_hidden_layers
    assert patient.num(ATTENTION) == patient.num(MLP) == num_layers
    linears = (decoder.model.layers[0].self_attn.qkv, decoder.model.layers[1].mlp.gate_up)
    for linear in (*linears, decoder.lm_head):
        assert isinstance(linear, QuantizedLinear)
        assert linear.values.dtype == torch.int8


def test_modules_that_only_look_alike_are_kept() -> None:
    """The comparison finds a norm that adds, a gate that squares, an attention that scales."""
    patient = exchanged("llama", torch.float32, spoil=_spoil)

    decoder = patient.decoder
    num_layers = decoder.config.num_hidden_layers
    first = decoder.model.layers[0]
    assert type(decoder.model.norm).__name__ == "LlamaRMSNorm"
    assert type(first.mlp).__name__ == "LlamaMLP"
    assert type(first.self_attn).__name__ == "LlamaAttention"
    assert patient.num(MLP) == patient.num(ATTENTION) == num_layers - 1
