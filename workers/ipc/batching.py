"""The part of the engine's options that an operator writes beside a model, and may change while
it runs. Plain values: what they do is said in `strategies` and `engine`.
"""

from typing import Literal

import msgspec

StrategyName = Literal["continuous", "static", "dynamic"]

STATIC_WAIT_S = 1.0
DYNAMIC_WINDOW_S = 0.02


class StrategyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batching strategy and its parameters; each strategy reads those that it has."""

    name: StrategyName = "continuous"
    batch_size: int = 8  # static, dynamic: sequences of a full batch
    window_s: float | None = None  # static, dynamic: the longest wait for a full batch
    drain_share: float = 0.0  # static: the next may start once no more of the batch still runs
    bucket_edges: tuple[int, ...] = ()  # dynamic: prompt lengths that part the batches, ascending
    padded: bool = False  # static, dynamic: compute batches as rectangles


class LaneOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lane as the engine sees it. None: the engine's own default."""

    name: str
    priority: int | None = None  # the smallest goes first
    itl_target_s: float | None = None  # between two tokens of a stream
    ttft_target_s: float | None = None  # to the first token
    min_share: float | None = None  # of the computed tokens, while the lane has work
    ageing_tokens: int | None = None  # computed for others, they lift a tenant by one priority
    strategy: StrategyOptions | None = None  # None: the one of all lanes
