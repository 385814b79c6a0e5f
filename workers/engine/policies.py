"""Who comes first: one function from a sequence and the time to a sort key.

Leaves to the scheduler what is done with the order, and to strategies when to admit.
"""

from typing import Protocol

from workers.engine.sequence import Sequence

# Numbers throughout, so that policies compose by joining their tuples.
Key = tuple[float, ...]


class Policy(Protocol):
    """A total order of sequences: the smallest key runs first and is preempted last."""

    def key(self, sequence: Sequence, now_s: float) -> Key:
        """Differs between any two sequences; `now_s` is the engine's monotonic clock."""
        ...


class FirstComeFirstServed:
    """By arrival in this engine; a preempted sequence keeps its place."""

    def key(self, sequence: Sequence, now_s: float) -> Key:
        return (sequence.arrival,)
