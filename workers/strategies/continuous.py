"""Continuous batching: a sequence joins as soon as the step has tokens left for it."""

from workers.engine.sequence import Sequence
from workers.engine.strategy import Admission


class ContinuousBatching:
    """Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, 2024)."""

    def admits(self, candidate: Sequence, admission: Admission) -> bool:
        return admission.num_tokens_left > 0
