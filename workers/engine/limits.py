"""Limits of an engine and its steps, and the deadlines of its jobs."""

from collections.abc import Container
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

# The default if neither the operator nor the loader sets a token budget.
DEFAULT_STEP_TOKENS = 2048
_FEW = 1024  # deadlines that are kept in any case


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine. Raises ValueError if no sequence could ever run."""

    max_num_batched_tokens: int  # token budget of a step
    max_num_seqs: int  # sequences that hold blocks at the same time
    vocab_size: int  # token ids at or above it are refused
    kv_high_water: float = 0.8  # share of the blocks up to which new sequences are admitted
    prefill_share: float | None = None  # share of the budget for prompts while there are streams
    max_preemptions: int = 3  # of one sequence; then it yields only to older ones of its kind
    grows_ahead: bool = False  # allocate the block of a stream's next token a step early
    prefix_caching: bool = True  # reuse blocks by content
    speculates: bool = False  # compute drafted tokens where that is expected to pay
    # A prompt yields a vector and no tokens, and is computed in one step.
    prefill_only: bool = False

    def __post_init__(self) -> None:
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.vocab_size) < 1:
            raise ValueError("budget, number of sequences and vocabulary must be positive")
        if not 0.0 < self.kv_high_water <= 1.0:
            raise ValueError("kv_high_water is a share of the KV blocks: over 0, at most 1")
        if self.prefill_share is not None and not 0.0 < self.prefill_share <= 1.0:
            raise ValueError("prefill_share is a share of the budget: over 0, at most 1")
        if self.max_preemptions < 0:
            raise ValueError("max_preemptions must not be negative")


class Deadlines:
    """A queue of job deadlines: times on the engine's clock. A job may have several; the engine
    knows the valid one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int]] = []
        self._most = _FEW

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, even if it is out of date."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_s: float, job_id: str, epoch: int, held: Container[str]) -> None:
        """Adds a deadline. `held`: the jobs that have not ended. Deadlines of others are forgotten
        when they may be half of all; otherwise a day's would be kept."""
        if len(self._heap) >= self._most:
            self._heap = [each for each in self._heap if each[1] in held]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + _FEW
        heappush(self._heap, (deadline_s, job_id, epoch))

    def take_passed(self, now_s: float) -> list[tuple[float, str, int]]:
        """Returns the deadlines up to now, in order, with job and epoch."""
        passed = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heappop(self._heap))
        return passed
