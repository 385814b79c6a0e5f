"""A decoder of the common shape as one loop over its layers.

Saves module calls, adds residuals inside the matrix products, and drops rows without wanted logits
after the last layer's KV is written.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.fusion.blocks import MergedAttention, MergedMLP, NativeRMSNorm
from workers.model.kv_cache import KVCache
from workers.model.linear import NativeGates, NativeLinear, PackedLinear, PlainLinear
from workers.model.native.attention import PreparedNative
from workers.model.native.kernels import Kernels
from workers.model.native.layers import LayerSizes, LayerWeights, NativeLayers
from workers.model.quantization import QuantizedLinear

_LINEAR = (NativeLinear, PackedLinear, PlainLinear, QuantizedLinear, nn.Linear)
# Limit of the rotary table of all positions. Instead of a larger one, each step computes cosines
# and sines. 131,072 positions of 128 numbers take 64 MiB in bfloat16.
_MAX_TABLE_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: NativeRMSNorm
    attention: MergedAttention
    before_mlp: NativeRMSNorm
    mlp: MergedMLP


class Stack:
    """Computes a ForCausalLM's forward on a flat batch."""

    def __init__(
        self,
        decoder: Any,
        layers: tuple[_Layer, ...],
        num_positions: int,
        vocab_size: int,
        native: NativeLayers | None,
    ) -> None:
        self._embedding: nn.Embedding = decoder.model.embed_tokens
        self._layers = layers
        self._native = native
        self._norm: NativeRMSNorm = decoder.model.norm
        self._head: nn.Module = decoder.lm_head
        self._vocab_size = vocab_size
        self._turns = _Turns(decoder.model.rotary_emb, self._embedding.weight, num_positions)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_index: Tensor, step: Any
    ) -> Tensor:
        """input_ids and position_ids (1, T); `step` a PagedStep -> logits (num_rows, vocab_size)
        of the rows in logits_index (num_rows,).
        """
        x: Tensor = self._embedding(input_ids[0])
        cos, sin = self._turns.at(position_ids)
        if self._native is not None and isinstance(step.prepared, PreparedNative):
            x = self._native.run(x, cos, sin, step.slot_mapping, step.prepared, logits_index)
        else:
            x = self._run(x, cos, sin, logits_index, step)
        if len(x) == 0:
            return x.new_empty(0, self._vocab_size)
        if isinstance(self._head, nn.Linear):
            plain: Tensor = self._head(self._norm(x))
            return plain
        logits: Tensor = self._head(x, self._norm)
        return logits

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, logits_index: Tensor, step: Any) -> Tensor:
        """x (T, hidden) -> the last layer's output of the rows in logits_index."""
        for layer in self._layers:
            mixed = layer.attention.mix(x, cos, sin, step, layer.before_attention)
            if layer is self._layers[-1]:
                if len(logits_index) == 0:
                    return x[:0]
                if len(logits_index) < len(x):
                    mixed, x = mixed[logits_index], x[logits_index]
            # Nothing else reads `x` any more, so that a layer may add to it in place.
            x = layer.attention.o_proj.add(mixed, x)
            x = layer.mlp.down_proj.add(layer.mlp.gated(x, layer.before_mlp), x)
        return x


class _Turns:
    """Cosines and sines of the rotary embedding, (T, rotary) each."""

    def __init__(self, rotary: nn.Module, like: Tensor, num_positions: int) -> None:
        self._rotary, self._like = rotary, like[:1]
        width = len(self._compute(torch.zeros(1, 1, dtype=torch.int64))[0][0])
        self._table: tuple[Tensor, Tensor] | None = None
        if 2 * num_positions * width * like.element_size() <= _MAX_TABLE_BYTES:
            self._table = self._compute(torch.arange(num_positions)[None])

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self._table is None:
            return self._compute(position_ids)
        cos, sin = self._table
        return cos[position_ids[0]], sin[position_ids[0]]

    def _compute(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(self._like, position_ids)
        return cos[0].contiguous(), sin[0].contiguous()


def stack_of(decoder: Any, num_positions: int, cache: KVCache) -> Stack | None:
    """Returns a loop that replaces the decoder's forward if all its modules are known types; else
    None. A comparison must show that the forward does nothing else."""
    if not (
        _has_just(decoder, {"model": nn.Module, "lm_head": _LINEAR})
        and not decoder.lm_head._forward_hooks
        and not decoder.lm_head._forward_pre_hooks
        and _has_just(
            decoder.model,
            {
                "embed_tokens": nn.Embedding,
                "layers": nn.ModuleList,
                "norm": NativeRMSNorm,
                "rotary_emb": nn.Module,
            },
        )
        and type(decoder.model.embed_tokens) is nn.Embedding
        and all(map(_is_known, decoder.model.layers))
    ):
        return None
    layers = tuple(
        _Layer(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
        for layer in decoder.model.layers
    )
    vocab_size = int(decoder.config.get_text_config().vocab_size)
    native = _native_layers(layers, cache)
    return Stack(decoder, layers, num_positions, vocab_size, native)


def _native_layers(layers: tuple[_Layer, ...], cache: KVCache) -> NativeLayers | None:
    """The layers for the kernels, if these compute all of every layer; all have one size."""
    weights = [_weights(layer, cache) for layer in layers]
    found = [each for each in weights if each is not None]
    if len(found) < len(layers) or len({sizes for _, sizes, _ in found}) != 1:
        return None
    _, sizes, kernels = found[0]
    return NativeLayers([each for each, _, _ in found], sizes, kernels)


def _weights(layer: _Layer, cache: KVCache) -> tuple[LayerWeights, LayerSizes, Kernels] | None:
    """A layer for the kernels; None if they do not compute one of its parts, or it has a bias."""
    attention, mlp, kept = layer.attention, layer.mlp, cache.layers[layer.attention]
    gates = mlp.gate_up
    qkv, out, down = map(_unbiased, (attention.qkv, attention.o_proj, mlp.down_proj))
    if qkv is None or out is None or down is None or not isinstance(gates, NativeGates):
        return None
    if not attention.turns_natively:
        return None
    weights = LayerWeights(
        before_attention=(layer.before_attention.weight, layer.before_attention.eps),
        qkv=qkv.panels,
        head_norms=attention.norms,
        out=out.panels,
        before_mlp=(layer.before_mlp.weight, layer.before_mlp.eps),
        gate_up=gates.panels,
        down=down.panels,
        keys=kept.key_slots,
        values=kept.value_slots,
        flags=attention.flags,
    )
    num_heads, kv_heads, dim = attention.num_heads, attention.kv_heads, attention.head_dim
    sizes = LayerSizes(out.num_out, num_heads, kv_heads, dim, gates.num_out)
    return weights, sizes, gates.kernels


def _unbiased(linear: nn.Module) -> NativeLinear | None:
    """The layer, if it is the kernels' and has no bias."""
    return linear if isinstance(linear, NativeLinear) and linear.bias is None else None


def _is_known(layer: nn.Module) -> bool:
    kinds = {
        "self_attn": MergedAttention,
        "mlp": MergedMLP,
        "input_layernorm": NativeRMSNorm,
        "post_attention_layernorm": NativeRMSNorm,
    }
    return _has_just(layer, kinds)


def _has_just(module: nn.Module, kinds: dict[str, Any]) -> bool:
    """Whether it has exactly these children, no hooks and no parameters of its own."""
    children = dict(module.named_children())
    return (
        children.keys() == kinds.keys()
        and all(isinstance(children[name], kind) for name, kind in kinds.items())
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not any(True for _ in module.parameters(recurse=False))
    )
