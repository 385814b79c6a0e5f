"""The extra tokens of padded batches, computed for a fair comparison.

A padded batch is a rectangle: prompts are padded to the longest, and rows that have ended continue
with one token per step until the batch ends.
"""

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.interface import Chunk, Padding
from workers.engine.strategy import Batch


@dataclass(slots=True)
class PaddingDebt:
    """Pad tokens that are due; they come first in a step's budget.

    A rectangle yields tokens only when it is computed completely; what exceeds a step's budget is
    carried over to the next.
    """

    _due: deque[Padding]

    def __init__(self) -> None:
        self._due = deque()

    def owe_prompts(self, batch: Batch) -> None:
        """Pads a new batch's rows to the longest prompt."""
        longest = max(sequence.num_known for sequence in batch.sequences)
        for sequence in batch.sequences:
            if sequence.num_known < longest:
                self._due.append(Padding(sequence.num_known, longest - sequence.num_known))

    def owe_rows(self, batches: Seq[Batch], chunks: Collection[Chunk]) -> None:
        """Continues ended rows of batches that sample in this step."""
        for batch in batches:
            num_ended = batch.num_rows - len(batch.sequences)
            lasts = [
                chunk.start + chunk.num_tokens - 1
                for chunk in chunks
                if chunk.samples and chunk.sequence in batch.sequences
            ]
            if num_ended and lasts:
                self._due.extend([Padding(max(lasts), 1)] * num_ended)

    def pay(self, num_tokens: int) -> list[Padding]:
        """Takes up to `num_tokens` due tokens."""
        paid: list[Padding] = []
        while self._due and num_tokens > 0:
            first = self._due.popleft()
            now = min(first.num_tokens, num_tokens)
            paid.append(Padding(first.start, now))
            if now < first.num_tokens:
                self._due.appendleft(Padding(first.start + now, first.num_tokens - now))
            num_tokens -= now
        return paid

    def clear(self) -> None:
        self._due.clear()


def num_tokens_of(padding: Seq[Padding]) -> int:
    return sum(pad.num_tokens for pad in padding)
