"""Attention for training, as plain matrix products. On a CPU torch's fused backward pass is three
to five times slower for short sequences."""

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

TRAINING_ATTENTION = "causal_by_length"
_MAX_PLAIN_TOKENS = 512  # above, the fused kernel is faster


def register_training_attention() -> None:
    """Makes TRAINING_ATTENTION known to transformers, which passes it no mask."""
    AttentionInterface.register(TRAINING_ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention of [batch, heads, tokens, head size] → [batch, tokens, heads, head size]."""
    assert attention_mask is None
    num_groups = query.shape[1] // key.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)
    key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
    num_tokens = query.shape[2]
    if num_tokens > _MAX_PLAIN_TOKENS:
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
    else:
        future = torch.full((num_tokens, num_tokens), -torch.inf, dtype=value.dtype).triu(1)
        weights = ((query * scaling) @ key.transpose(-1, -2) + future).softmax(dim=-1)
        mixed = weights.to(value.dtype) @ value
    return mixed.transpose(1, 2), None
