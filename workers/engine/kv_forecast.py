"""Predicts the most blocks that the running sequences will need.

After LightLLM's Past-Future scheduler (ASPLOS 2025).
"""

from collections.abc import Collection
from typing import NamedTuple

from workers.engine.block_manager import BlockManager
from workers.engine.lengths import LengthPredictor
from workers.engine.sequence import Sequence


class Need(NamedTuple):
    """Predicted further tokens of a sequence, and blocks of its known tokens."""

    num_more: int
    num_blocks: int


class KVForecast:
    """The needs of the running sequences at one moment.

    Created in every step that admits a sequence. It looks at each running sequence once, and again
    only if all of them at their longest would not fit.
    """

    def __init__(
        self, blocks: BlockManager, lengths: LengthPredictor, running: Collection[Sequence]
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._running = set(running)
        self._entered: dict[Sequence, Need] = {}  # admitted in this step
        num_blocks, num_following, size = 0, 0, blocks.block_size
        for sequence in running:
            num_known = len(sequence.token_ids)
            num_more = sequence.num_foreseen - num_known
            if num_more <= 0:
                num_more = self._foresee(sequence) - num_known
            num_blocks += -(-num_known // size)
            num_following += -(-num_more // size)
        self._num_blocks = num_blocks
        # An upper bound: all at their ends at once.
        self._num_full = num_blocks + num_following
        self._num_shared = blocks.num_shared  # shared blocks count once

    def _foresee(self, sequence: Sequence) -> int:
        """Predicts again, as the sequence reached its earlier prediction."""
        sequence.num_foreseen = sequence.num_prompt + self._lengths.predict(sequence)
        return sequence.num_foreseen

    def need(self, sequence: Sequence, num_held: int = 0) -> Need:
        """The need of a sequence that already has `num_held` blocks."""
        num_known = len(sequence.token_ids)
        num_more = sequence.num_foreseen - num_known
        if num_more <= 0:
            num_more = self._foresee(sequence) - num_known
        return Need(num_more, self._blocks.num_blocks_for(num_known) - num_held)

    def add(self, sequence: Sequence, need: Need) -> None:
        """Adds a sequence that runs from here on."""
        self._running.add(sequence)
        self._entered[sequence] = need
        self._num_blocks += need.num_blocks
        self._num_full += self._num_full_of(need)

    def drop(self, sequence: Sequence) -> None:
        """Drops a sequence that will lose its blocks."""
        if sequence in self._running:
            need = self._need_of(sequence)
            self._running.discard(sequence)
            self._num_blocks -= need.num_blocks
            self._num_full -= self._num_full_of(need)
            self._num_shared -= len(sequence.block_ids) - self._blocks.num_private(sequence)

    def _need_of(self, running: Sequence) -> Need:
        """The need as counted; it does not change within a step."""
        return self._entered.get(running) or self.need(running)

    def num_blocks_of(self, running: Sequence) -> int:
        """A running sequence's blocks of known tokens."""
        return self._need_of(running).num_blocks

    def num_known(self, new: Need) -> int:
        """Blocks of all known tokens including `new`."""
        return self._num_blocks + new.num_blocks - self._num_shared

    def num_at_most(self, new: Need) -> int:
        """An upper bound of `peak` for any yielding sequences."""
        return self._num_full + self._num_full_of(new) - self._num_shared

    def peak(self, new: Need, yielding: Collection[Sequence]) -> int:
        """The maximum number of blocks over time, if yielding sequences stop growing and leave
        first.

        When a sequence ends, all that last longer have grown by as much as it did, so the maximum
        is reached at the end of one of them.
        """
        needs = [self._need_of(s) for s in self._running if s not in yielding]
        needs.append(new)
        needs.sort(reverse=True)
        num_peak = num_blocks = 0
        for num_lasting, need in enumerate(needs, start=1):
            num_blocks += need.num_blocks
            num_grown = self._blocks.num_blocks_for(num_lasting * need.num_more)
            num_peak = max(num_peak, num_blocks + num_grown)
        return num_peak - self._num_shared

    def _num_full_of(self, need: Need) -> int:
        """The number of blocks at its predicted end."""
        return need.num_blocks + self._blocks.num_blocks_for(need.num_more)
