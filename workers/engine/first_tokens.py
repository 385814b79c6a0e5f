"""What first tokens wait for, which says how much of a step less urgent work may take."""

from collections.abc import Iterable

from workers.engine.interface import Chunk
from workers.engine.sequence import Sequence

_RISE = 1.02


class FirstTokens:
    """Those of lanes without `max_slowdown`: each waits for the end of the step in which its job
    comes, and for its own steps.

    `step_s`: how long such a step takes without the work of other lanes. It falls at once to the
    mean of the last first token and rises by 2 % with each, so that long prompts do not hide that
    short ones would wait longer by comparison. None: there was none yet.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self._sum_s, self._num_steps = 0.0, 0
        self._waiting: dict[Sequence, tuple[float, int]] = {}  # the sums when it came

    def arrive(self, sequence: Sequence) -> None:
        if not sequence.num_output:
            self._waiting[sequence] = self._sum_s, self._num_steps

    def leave(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)

    def settle(self, chunks: Iterable[Chunk], own_s: float, least_s: float) -> None:
        """Accounts for a step that took `own_s` without the limited lanes; the one in which a job
        came would have taken `least_s`. `chunks`: those that may sample first tokens."""
        self._sum_s += own_s
        self._num_steps += 1
        waiting = self._waiting
        for sequence in [c.sequence for c in chunks if c.samples and c.sequence in waiting]:
            sum_s, num_steps = waiting.pop(sequence)
            mean_s = (least_s + self._sum_s - sum_s) / (1 + self._num_steps - num_steps)
            self.step_s = min(mean_s, _RISE * (self.step_s or mean_s))
