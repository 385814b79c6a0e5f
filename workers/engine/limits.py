"""Limits of an engine and its steps."""

from dataclasses import dataclass

# The default if neither the operator nor the loader sets a token budget.
DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Raises ValueError if no sequence could ever run."""

    max_num_batched_tokens: int  # token budget of a step
    max_num_seqs: int  # sequences that hold blocks at the same time
    vocab_size: int  # token ids at or above it are refused
    kv_high_water: float = 0.8  # share of the blocks up to which new sequences are admitted
    prefill_share: float | None = None  # share of the budget for prompts while there are streams
    max_preemptions: int = 3  # of one sequence; then it yields only to older ones of its kind
    grows_ahead: bool = False  # allocate the block of a stream's next token a step early
    prefix_caching: bool = True  # reuse blocks by content

    def __post_init__(self) -> None:
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.vocab_size) < 1:
            raise ValueError("budget, number of sequences and vocabulary must be positive")
        if not 0.0 < self.kv_high_water <= 1.0:
            raise ValueError("kv_high_water is a share of the KV blocks: over 0, at most 1")
        if self.prefill_share is not None and not 0.0 < self.prefill_share <= 1.0:
            raise ValueError("prefill_share is a share of the budget: over 0, at most 1")
        if self.max_preemptions < 0:
            raise ValueError("max_preemptions must not be negative")
