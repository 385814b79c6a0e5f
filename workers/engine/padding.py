"""What padded batches compute for nothing, so that a comparison with them is honest.

A padded batch is a rectangle. Its prompts are padded to the longest one, and a row whose
sequence has ended goes on with one token a step until the batch has ended. Knows counts and
positions; leaves to the model what a pad token costs, which is what any token costs.
"""

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.model import Chunk, Padding
from workers.engine.strategy import Batch


@dataclass(slots=True)
class PaddingDebt:
    """Pad tokens that are due. They come out of the same budget, and before anything else.

    A rectangle is computed as a whole before it yields tokens; what a step has no tokens left
    for, the next one owes.
    """

    _due: deque[Padding]

    def __init__(self) -> None:
        self._due = deque()

    def owe_prompts(self, batch: Batch) -> None:
        """A batch begins: all its rows become as long as the longest."""
        longest = max(sequence.num_known for sequence in batch.sequences)
        for sequence in batch.sequences:
            if sequence.num_known < longest:
                self._due.append(Padding(sequence.num_known, longest - sequence.num_known))

    def owe_rows(self, batches: Seq[Batch], chunks: Collection[Chunk]) -> None:
        """A step is planned: where a batch samples, its rows that have ended go on as well."""
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
        """Takes off what so many tokens pay for."""
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
