"""How many blocks the running sequences will need at most, if outputs go on as predicted.

After LightLLM's Past-Future scheduler (ASPLOS 2025). Counts blocks; leaves prediction to a
LengthPredictor and the verdict to the admission check.
"""

from collections.abc import Collection
from typing import NamedTuple

from workers.engine.block_manager import BlockManager
from workers.engine.lengths import LengthPredictor
from workers.engine.sequence import Sequence


class Need(NamedTuple):
    """Tokens that are thought to follow, and blocks for all known ones of a sequence."""

    num_more: int
    num_blocks: int


class KVForecast:
    """The needs of the running sequences at one moment, and of one more.

    Made in every step that lets one in, so it looks at each running sequence once, and again only
    where all of them at their longest would not fit.
    """

    def __init__(
        self, blocks: BlockManager, lengths: LengthPredictor, running: Collection[Sequence]
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._running = set(running)
        self._entered: dict[Sequence, Need] = {}  # of those who run, in this step
        num_blocks, num_following, size = 0, 0, blocks.block_size
        for sequence in running:
            num_known = len(sequence.token_ids)
            num_more = sequence.num_foreseen - num_known
            if num_more <= 0:
                num_more = self._foresee(sequence) - num_known
            num_blocks += -(-num_known // size)
            num_following += -(-num_more // size)
        self._num_blocks = num_blocks
        # No moment needs more: where each is at its end at once.
        self._num_full = num_blocks + num_following
        self._num_shared = blocks.num_shared  # blocks that several hold count once

    def _foresee(self, sequence: Sequence) -> int:
        """Anew, for one that has reached what was foreseen before."""
        sequence.num_foreseen = sequence.num_prompt + self._lengths.predict(sequence)
        return sequence.num_foreseen

    def need(self, sequence: Sequence, num_held: int = 0) -> Need:
        """Of a sequence for whose first tokens `num_held` blocks need not be found."""
        num_known = len(sequence.token_ids)
        num_more = sequence.num_foreseen - num_known
        if num_more <= 0:
            num_more = self._foresee(sequence) - num_known
        return Need(num_more, self._blocks.num_blocks_for(num_known) - num_held)

    def add(self, sequence: Sequence, need: Need) -> None:
        """The sequence runs from now on."""
        self._running.add(sequence)
        self._entered[sequence] = need
        self._num_blocks += need.num_blocks
        self._num_full += self._num_full_of(need)

    def drop(self, sequence: Sequence) -> None:
        """The sequence is about to lose its blocks."""
        if sequence in self._running:
            need = self._need_of(sequence)
            self._running.discard(sequence)
            self._num_blocks -= need.num_blocks
            self._num_full -= self._num_full_of(need)
            self._num_shared -= len(sequence.block_ids) - self._blocks.num_private(sequence)

    def _need_of(self, running: Sequence) -> Need:
        """As it was counted: nobody gets a token within a step."""
        return self._entered.get(running) or self.need(running)

    def num_blocks_of(self, running: Sequence) -> int:
        """Of those for all tokens known now, the part of one who runs."""
        return self._need_of(running).num_blocks

    def num_known(self, new: Need) -> int:
        """Blocks for all tokens known now, with one sequence more."""
        return self._num_blocks + new.num_blocks - self._num_shared

    def num_at_most(self, new: Need) -> int:
        """Blocks that `peak` cannot exceed, whoever yields."""
        return self._num_full + self._num_full_of(new) - self._num_shared

    def peak(self, new: Need, yielding: Collection[Sequence]) -> int:
        """Blocks at the worst moment to come, where those that yield grow no more and are the
        first to go; so with fewer of them only `num_known` is less.

        When a sequence ends, all that are thought to last longer have grown by as much as it
        has; so the worst moment is the end of one of them.
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
        """Blocks at its end."""
        return need.num_blocks + self._blocks.num_blocks_for(need.num_more)
