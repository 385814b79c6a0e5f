"""Runs all layers of a decoder in one call of the kernels.

Otherwise Python's own code and data, displaced by the weights, would be fetched again between
kernels. The structs match layers.h field by field.
"""

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags
from workers.model.native.attention import PreparedNative
from workers.model.native.kernels import Kernels, Panels

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
        structs = [_layer(layer, at) for layer, at in zip(layers, self._sinks, strict=True)]
        self._table = (_Layer * len(layers))(*structs)
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


class _Layer(ctypes.Structure):
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


def _layer(layer: LayerWeights, sinks: Tensor | None) -> _Layer:
    q_norm, k_norm, head_eps = layer.head_norms or (None, None, 0.0)
    flags = layer.flags
    return _Layer(
        before_attention=layer.before_attention[0].data_ptr(),
        qkv=_weights(layer.qkv),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        out=_weights(layer.out),
        before_mlp=layer.before_mlp[0].data_ptr(),
        gate_up=_weights(layer.gate_up),
        down=_weights(layer.down),
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


def _weights(panels: Panels) -> _Weights:
    scales = panels.scales
    return _Weights(panels.weights.data_ptr(), None if scales is None else scales.data_ptr())
