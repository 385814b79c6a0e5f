"""The masks of one step, which other threads compute beside it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import wait

import numpy as np

from workers.engine.grammar import Mask
from workers.engine.sequence import Sequence


class StepMasks:
    """The tokens that the constrained rows of one step may not take."""

    def __init__(self, masks: Mapping[Sequence, Mask], patience_s: float | None = None) -> None:
        """`masks` by sequence. After `patience_s` a step continues without those that are late."""
        self._masks = masks
        self._patience_s = patience_s
        self.late: set[Sequence] = set()  # those that the step lacked

    def of(self, sequences: Seq[Sequence]) -> tuple[list[int], np.ndarray]:
        """Waits for the masks. Returns which of `sequences` are constrained, as indices, and the
        tokens that each of those may not take: bool, shape (number of indices, vocab_size). Late
        ones are left out; what is drawn for those has no meaning."""
        masks = {i: self._masks[s] for i, s in enumerate(sequences) if s in self._masks}
        found, _ = wait({mask.found for mask in masks.values()}, self._patience_s)
        ready = {index: mask for index, mask in masks.items() if mask.found in found}
        self.late |= {sequences[index] for index in masks.keys() - ready.keys()}
        rows = [mask.found.result()[mask.row] for mask in ready.values()]
        return list(ready), np.stack(rows) if rows else np.empty((0, 0), dtype=bool)
