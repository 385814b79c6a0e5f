"""A decoder of the common shape as one loop over its layers.

Saves module calls, adds residuals inside the matrix products, and drops rows without wanted logits
after the last layer's KV is written. Where it can, one call of the kernels runs all layers:
otherwise Python's own code and data, displaced by the weights, would be fetched again between
kernels. The structs match native/layers.h field by field.
"""

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.attention.interface import AttentionFlags
from workers.model.fusion.blocks import MergedAttention, MergedMLP
from workers.model.kv_cache import KVCache
from workers.model.linear import (
    NativeGates,
    NativeLinear,
    NativeRMSNorm,
    PackedLinear,
    PlainLinear,
)
from workers.model.native.kernels import Kernels, Panels, PreparedNative
from workers.model.quantization import QuantizedLinear

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What all layers share; `inner` is the width of the gated MLP."""

    hidden: int
    num_heads: int
    kv_heads: int
    dim: int
    inner: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: RMSNorm weights with eps, product panels, and KV (num_slots, kv_heads, dim).
    `head_norms` are of each query and key head."""

    before_attention: tuple[Tensor, float]
    qkv: Panels
    head_norms: tuple[Tensor, Tensor, float] | None
    out: Panels
    before_mlp: tuple[Tensor, float]
    gate_up: Panels
    down: Panels
    keys: Tensor
    values: Tensor
    flags: AttentionFlags


class NativeLayers:
    """The layers, prepared for the kernels."""

    def __init__(self, layers: Seq[LayerWeights], sizes: LayerSizes, kernels: Kernels) -> None:
        self._layers = tuple(layers)  # keeps alive what the structs point to
        self._sizes = sizes
        self._kernels = kernels
        self._sinks = [
            None if layer.flags.sinks is None else layer.flags.sinks.float().contiguous()
            for layer in layers
        ]
        structs = [_native_layer(layer, at) for layer, at in zip(layers, self._sinks, strict=True)]
        self._table = (_NativeLayer * len(layers))(*structs)
        self._room = torch.empty(0, dtype=kernels.dtype)

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kept_at: Tensor,
        prepared: PreparedNative,
        wanted: Tensor,
    ) -> Tensor:
        """x (T, hidden), overwritten; cos and sin (T, rotary); kept_at int64 (T,): each row's cache
        slot -> (num_wanted, hidden): the last layer's output of rows `wanted` int64."""
        s = self._sizes
        assert all(part.is_contiguous() for part in (x, cos, sin, kept_at, wanted))
        assert all(part.dtype == self._kernels.dtype for part in (x, cos, sin))
        found = x.new_empty(len(wanted), s.hidden)
        tiles = prepared.tiles(s.num_heads // s.kv_heads)
        last_tiles = prepared.tiles_of_rows(wanted, s.num_heads // s.kv_heads)
        step = _Step(
            rows=len(x),
            num_wanted=len(wanted),
            num_tiles=len(tiles),
            num_last_tiles=len(last_tiles),
            x=x.data_ptr(),
            found=found.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            kept_at=kept_at.data_ptr(),
            slots=prepared.slots.data_ptr(),
            tiles=tiles.data_ptr(),
            last_tiles=last_tiles.data_ptr(),
            wanted=wanted.data_ptr(),
        )
        self._give_room(step, len(x))
        sizes = _Sizes(s.hidden, s.num_heads, s.kv_heads, s.dim, s.inner, cos.shape[1])
        self._kernels.run_layers(self._table, len(self._layers), sizes, step)
        return found

    def _give_room(self, step: "_Step", num_rows: int) -> None:
        """Sets scratch memory that consecutive steps share."""
        s = self._sizes
        widths = {
            "normed": s.hidden,
            "qkv": (s.num_heads + 2 * s.kv_heads) * s.dim,
            "attended": s.num_heads * s.dim,
            "inner": s.inner,
        }
        num_elements = num_rows * sum(widths.values())
        if len(self._room) < num_elements:
            self._room = self._room.new_empty(num_elements)
        at = self._room.data_ptr()
        for name, width in widths.items():
            setattr(step, name, at)
            at += num_rows * width * self._room.element_size()


class _Weights(ctypes.Structure):
    _fields_ = [("panels", _P), ("scales", _P)]


class _NativeLayer(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("before_attention", "q_norm", "k_norm", "before_mlp")),
        *((name, _Weights) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _P) for name in ("keys", "values", "sinks")),
        ("window", _I),
        *((name, _F) for name in ("attention_eps", "head_eps", "mlp_eps", "scale", "softcap")),
    ]


class _Sizes(ctypes.Structure):
    _fields_ = [
        (name, _I) for name in ("hidden", "num_heads", "kv_heads", "dim", "inner", "rotary")
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("rows", "num_wanted", "num_tiles", "num_last_tiles")),
        *((name, _P) for name in ("x", "found", "cos", "sin", "kept_at")),
        *((name, _P) for name in ("slots", "tiles", "last_tiles", "wanted")),
        *((name, _P) for name in ("normed", "qkv", "attended", "inner")),
    ]


def _native_layer(layer: LayerWeights, sinks: Tensor | None) -> _NativeLayer:
    q_norm, k_norm, head_eps = layer.head_norms or (None, None, 0.0)
    flags = layer.flags
    return _NativeLayer(
        before_attention=layer.before_attention[0].data_ptr(),
        qkv=_native_weights(layer.qkv),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        out=_native_weights(layer.out),
        before_mlp=layer.before_mlp[0].data_ptr(),
        gate_up=_native_weights(layer.gate_up),
        down=_native_weights(layer.down),
        keys=layer.keys.data_ptr(),
        values=layer.values.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        window=flags.window or 0,
        attention_eps=layer.before_attention[1],
        head_eps=head_eps,
        mlp_eps=layer.before_mlp[1],
        scale=flags.scale,
        softcap=flags.softcap or 0.0,
    )


def _native_weights(panels: Panels) -> _Weights:
    scales = panels.scales
    return _Weights(panels.weights.data_ptr(), None if scales is None else scales.data_ptr())


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
