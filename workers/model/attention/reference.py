"""Reference attention by the formula, in float32: of spans, one sequence at a time, and of single
tokens whose rows, positions and blocks are tensors that the host does not know.

Supports every flag; the other back ends are tested against it. Slower than a kernel."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.attention.interface import AttentionFlags, Span
from workers.model.staging import to_device


class ReferenceAttention:
    """AttentionBackend that gathers a sequence's KV and attends, sequence by sequence."""

    def prepare(self, spans: Seq[Span], device: torch.device) -> "_PreparedReference":
        return _PreparedReference(spans)


class _PreparedReference:
    def __init__(self, spans: Seq[Span]) -> None:
        self._spans = spans

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
        for span in self._spans:
            rows = slice(span.first, span.first + span.num_tokens)
            slots = to_device(span.slots, query.device)
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


# Tokens of a part of a context, which Triton's kernel computes for a short span. It is fixed, so
# that a row's partial sums depend only on its own length.
SPLIT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RowsStep:
    """A step with one token per row. rows int64 (n,): row of the tables; positions int64 (n,);
    tables int64 (num_tables, num_blocks): block ids, any stride. `most_parts`: an upper bound of
    the parts of all contexts, of SPLIT_TOKENS each. `longest`: an upper bound of the contexts'
    lengths; None if the host does not know it, as in a recorded step."""

    rows: Tensor
    positions: Tensor
    tables: Tensor
    most_parts: int
    longest: int | None
    block_size: int


class PreparedRows:
    """PreparedAttention for a RowsStep. Raises ValueError if the longest context is unknown: each
    step would read as much as the longest possible one."""

    def __init__(self, step: RowsStep) -> None:
        if step.longest is None:
            raise ValueError("torch's attention reads contexts whose length the host must know")
        num_blocks = -(-step.longest // step.block_size)
        blocks = step.tables[step.rows, :num_blocks]
        offsets = torch.arange(step.block_size, device=blocks.device)
        slots = (blocks[:, :, None] * step.block_size + offsets).flatten(1)
        self._positions = step.positions[:, None]
        self._keys = torch.arange(slots.shape[1], device=blocks.device)[None]
        # Slots behind a row's position may belong to another sequence; use its first slot.
        is_own = self._keys <= self._positions
        self._slots = torch.where(is_own, slots, slots[:, :1])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
        seen = self._keys <= self._positions
        if flags.window is not None:
            seen = seen & (self._keys > self._positions - flags.window)
        found = attend_dense(
            query.unsqueeze(2),
            keys[self._slots].transpose(1, 2),
            values[self._slots].transpose(1, 2),
            seen[:, None, None, None],
            flags,
        )
        return found.squeeze(2)
