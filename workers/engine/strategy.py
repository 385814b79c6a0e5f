"""What a batching strategy decides: whether a waiting sequence may join the running ones now.

Changes when a sequence runs, never what it yields. Leaves order to the policy, and tokens,
blocks and limits to the scheduler, which asks only where all of those allow it.
"""

from dataclasses import dataclass
from typing import Protocol

from workers.engine.sequence import Sequence


@dataclass(slots=True)
class Admission:
    """The step under construction, as a strategy sees it. Counts of sequences and tokens."""

    now_s: float
    num_running: int  # with those admitted in this step
    num_admitted: int  # in this step
    num_waiting: int
    num_tokens_left: int  # of the step's budget


class Strategy(Protocol):
    """Decides who is admitted when. The scheduler asks in the policy's order, to the first no."""

    def admits(self, candidate: Sequence, admission: Admission) -> bool:
        """Must say yes sooner or later once nothing is running."""
        ...
