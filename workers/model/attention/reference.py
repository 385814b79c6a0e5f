"""Reference attention by the formula, in float32, one sequence at a time.

Supports every flag; the other back ends are compared with it. Slower than they."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, RowSpan


class ReferenceAttention:
    """AttentionBackend that gathers a sequence's KV and attends, sequence by sequence."""

    def prepare(self, spans: Seq[RowSpan], device: torch.device) -> "_PreparedReference":
        return _PreparedReference(spans)


class _PreparedReference:
    def __init__(self, spans: Seq[RowSpan]) -> None:
        self._spans = spans

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
        for span in self._spans:
            rows = slice(span.first, span.first + span.num_tokens)
            slots = torch.as_tensor(span.slots, device=query.device)
            out[rows] = attend_dense(
                query[rows].transpose(0, 1)[None],
                keys[slots].transpose(0, 1)[None],
                values[slots].transpose(0, 1)[None],
                causal_mask(span.start, span.num_tokens, 0, len(slots), flags.window, query.device),
                flags,
            )[0].transpose(0, 1)
        return out


def causal_mask(
    start: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Which keys (positions from `first_key`) the queries (from `start`) see: bool (num_queries,
    num_keys)."""
    query_positions = torch.arange(start, start + num_queries, device=device)[:, None]
    key_positions = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    seen = key_positions <= query_positions
    if window is not None:
        seen &= key_positions > query_positions - window
    return seen


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, flags: AttentionFlags
) -> Tensor:
    """Softmax attention with every flag but the window, which `seen` carries.

    query (B, num_heads, Q, k_dim), key (B, kv_heads, L, k_dim), value (B, kv_heads, L, v_dim),
    seen bool, broadcastable to (B, 1, 1, Q, L) -> (B, num_heads, Q, v_dim).
    """
    num_rows, num_heads, num_queries, k_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().view(num_rows, kv_heads, num_heads // kv_heads, num_queries, k_dim)
    scores = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * flags.scale
    if flags.softcap is not None:
        scores = torch.tanh(scores / flags.softcap) * flags.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if flags.sinks is not None:
        sinks = flags.sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    out = weights @ value.float().unsqueeze(2)
    return out.view(num_rows, num_heads, num_queries, -1).to(query.dtype)
