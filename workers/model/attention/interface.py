"""Connects transformers' attention modules to our attention.

Every module calls `paged_attention_forward`. The AttentionStep that the runner passes through the
forward decides what happens: a probe records shapes, a paged step writes KV and attends.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.engine.interface import ModelRefused

# Not `paged|…`, which transformers rewrites. Without a registered mask, none is built.
ATTENTION_NAME = "batchway"
# Keyword argument of the model's forward that carries the AttentionStep.
STEP_KEYWORD = "batchway_step"


class CannotShareBatch(ModelRefused):
    """Sequences of this decoder cannot share a batch; it may still run them one by one."""


class StepNotHandedDown(CannotShareBatch):
    """A layer does not pass the forward's keyword arguments to its attention."""


@dataclass(frozen=True, slots=True)
class AttentionFlags:
    """Per-layer attention options.

    `window`: a token sees itself and the `window - 1` before it. `softcap`: scores become `softcap
    * tanh(scores / softcap)`. `sinks` (num_heads,): an extra logit per head in the softmax's
    denominator.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """An attention layer's heads, their sizes, and its options. Layers of one `kv_group` attend to
    the same keys and values (Gemma 3n, Gemma 4), which are kept once."""

    num_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    flags: AttentionFlags
    kv_group: int | None = None

    @property
    def kv_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The sizes of one token's keys and values."""
        return (self.kv_heads, self.k_dim), (self.kv_heads, self.v_dim)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention call over the step's T tokens: query (T, num_heads, k_dim), key (T,
    kv_heads, k_dim), value (T, kv_heads, v_dim)."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    flags: AttentionFlags
    has_mask: bool
    extra: dict[str, Any]  # unsupported keyword arguments

    @property
    def shape(self) -> LayerShape:
        num_heads, k_dim = self.query.shape[1:]
        kv_heads, v_dim = self.value.shape[1:]
        return LayerShape(num_heads, kv_heads, k_dim, v_dim, self.flags)


class AttentionStep(Protocol):
    """What one forward does at each attention layer."""

    def attend(self, call: AttentionCall) -> Tensor:
        """The attention's output (T, num_heads, v_dim)."""


# Created for each chunk; creating a frozen dataclass takes seven times as long.
class RowSpan(Struct, frozen=True):
    """The rows of one chunk in the flat batch, and the cache slots of its sequence.

    Rows `first .. first + num_tokens - 1` hold positions `start ..`; `slots[p]` is the slot of
    position p, for the `start + num_tokens` positions that the chunk sees.
    """

    first: int
    num_tokens: int
    start: int
    slots: npt.NDArray[np.int64]


class PreparedAttention(Protocol):
    """A back end's plan for one step, shared by all layers."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        """query (T, num_heads, k_dim), keys (num_slots, kv_heads, k_dim),
        values (num_slots, kv_heads, v_dim) -> (T, num_heads, v_dim).
        """


class AttentionBackend(Protocol):
    """Attends through block tables."""

    def prepare(self, spans: Seq[RowSpan], device: torch.device) -> PreparedAttention: ...


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    batchway_step: AttentionStep | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. query (1, num_heads, T, k_dim), key and value
    (1, kv_heads, T, dim) -> (1, T, num_heads, v_dim). `s_aux` is its name for sinks.
    """
    if batchway_step is None:
        raise StepNotHandedDown(
            f"{type(module).__name__} is not handed the keyword arguments of its model's forward, "
            "by which it would learn of its sequences"
        )
    assert dropout == 0.0, "the model is in training mode"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = AttentionCall(
        module=module,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        flags=AttentionFlags(scale, sliding_window, softcap, s_aux),
        has_mask=attention_mask is not None,
        extra=extra,
    )
    # Contiguous, as transformers' own are: a family may view it in another shape (AFMoE).
    return batchway_step.attend(call).contiguous().unsqueeze(0), None


def register_attention() -> None:
    """Makes ATTENTION_NAME known to transformers. Registering twice is harmless."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
