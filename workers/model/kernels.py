"""The interface of our kernels beside attention, for CPU and GPU."""

from typing import Protocol

import torch
from torch import Tensor


class DecoderKernels(Protocol):
    """The kernels for one element type."""

    @property
    def dtype(self) -> torch.dtype: ...

    def can_turn(self, num_heads: int, kv_heads: int, dim: int) -> bool:
        """Whether `rotate_and_keep` and the attention support heads of these sizes."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (…, dim), weight (dim,) -> x / rms(x) * weight."""

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """gate_up (T, 2 * dim) -> silu(gate) * up (T, dim)."""

    def rotate_and_keep(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Rotates queries in place; writes rotated keys, and values, to the cache.

        qkv (T, (num_heads + 2 * kv_heads) * dim), cos and sin (T, rotary), slots int64 (T,), keys
        and values (num_slots, kv_heads, dim); norms: RMSNorm weights (dim,) of each query and key
        head, and eps.
        """

    def likeliest(self, logits: Tensor) -> Tensor: ...


def likeliest(logits: Tensor) -> Tensor:
    """logits (num_rows, vocab_size), any float type -> int64 (num_rows,): the token with the
    highest logit, the first of equals; -1 if the row has NaN or its highest is infinite."""
    token_ids = logits.argmax(-1)
    # argmax returns NaN if there is one, so checking the chosen logit is enough.
    is_finite = logits.gather(1, token_ids[:, None])[:, 0].isfinite()
    return torch.where(is_finite, token_ids, -1)
