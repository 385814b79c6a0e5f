"""How many blocks the running sequences will need at most, if outputs go on as predicted.

After LightLLM's Past-Future scheduler (ASPLOS 2025). Counts blocks; leaves prediction to a
LengthPredictor and the verdict to the scheduler.
"""

from collections.abc import Collection

from msgspec import Struct

from workers.engine.block_manager import BlockManager
from workers.engine.lengths import LengthPredictor
from workers.engine.sequence import Sequence


class Need(Struct, frozen=True, gc=False):
    """Blocks for all known tokens of a sequence, and tokens that are thought to follow."""

    num_blocks: int
    num_more: int


class KVForecast:
    """The needs of the running sequences at one moment, and of one more."""

    def __init__(
        self, blocks: BlockManager, lengths: LengthPredictor, running: Collection[Sequence]
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._needs = {sequence: self.need(sequence) for sequence in running}
        # Blocks that several hold count once.
        self._num_shared = sum(len(s.block_ids) for s in running) - blocks.num_used

    def need(self, sequence: Sequence, num_held: int = 0) -> Need:
        """Of a sequence for whose first tokens `num_held` blocks need not be found."""
        num_known = len(sequence.token_ids)
        num_output = num_known - sequence.num_prompt
        if num_output >= sequence.predicted_output:
            sequence.predicted_output = self._lengths.predict(sequence)
        num_more = max(0, sequence.predicted_output - num_output)
        return Need(self._blocks.num_blocks_for(num_known) - num_held, num_more)

    def add(self, sequence: Sequence, need: Need) -> None:
        self._needs[sequence] = need

    def drop(self, sequence: Sequence) -> None:
        """The sequence is about to lose its blocks."""
        if self._needs.pop(sequence, None) is not None:
            self._num_shared -= len(sequence.block_ids) - self._blocks.num_private(sequence)

    def num_known(self, new: Need, without: Collection[Sequence] = ()) -> int:
        """Blocks for all tokens known now, with one sequence more and without some."""
        num_blocks = sum(n.num_blocks for s, n in self._needs.items() if s not in without)
        return num_blocks + new.num_blocks - self._num_shared

    def peak(self, new: Need, yielding: Collection[Sequence], without: Collection[Sequence]) -> int:
        """Blocks at the worst moment to come, where those that yield grow no more.

        When a sequence ends, all that are thought to last longer have grown by as much as it
        has; so the worst moment is the end of one of them.
        """
        needs = [
            Need(need.num_blocks, 0) if sequence in yielding else need
            for sequence, need in self._needs.items()
            if sequence not in without
        ]
        needs.append(new)
        needs.sort(key=lambda need: -need.num_more)
        num_peak = num_blocks = 0
        for num_lasting, need in enumerate(needs, start=1):
            num_blocks += need.num_blocks
            num_grown = self._blocks.num_blocks_for(num_lasting * need.num_more)
            num_peak = max(num_peak, num_blocks + num_grown)
        return num_peak - self._num_shared
