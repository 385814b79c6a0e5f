"""Hands out slots for the states that recurrent and convolution layers keep beside the KV blocks.

A state covers all tokens up to one position, so a prefix can be shared only where its state was
kept: at the last block end of each chunk of a prompt, where an earlier prompt branched off, and at
the latest block end of each answer (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid
LLMs", 2024, keeps states at such places).
"""

from collections import OrderedDict
from collections.abc import Iterable

from workers.engine.interface import Chunk
from workers.engine.sequence import Sequence, SequenceState


class StateSlots:
    """`num_running` slots for running sequences; the others keep states of prefixes, by the key of
    their last block, until the least recently used one has to go. The block itself may go first."""

    def __init__(self, num_slots: int, num_running: int, block_size: int) -> None:
        assert 0 < num_running <= num_slots
        self.num_running = num_running
        self._block_size = block_size
        self._free = list(range(num_running - 1, -1, -1))
        self._blank = list(range(num_slots - 1, num_running - 1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._running: dict[int, SequenceState] = {}

    def num_usable(self, sequence: Sequence, num_blocks: int) -> int:
        """How many of its first `num_blocks` blocks, which are cached, end where a state is
        kept."""
        keys = sequence.block_keys
        return next((n for n in range(num_blocks, 0, -1) if keys[n - 1] in self._kept), 0)

    def start(self, sequence: Sequence, num_blocks: int, num_cached: int) -> None:
        """Gives it a slot, to start behind its first `num_blocks` blocks; KV of `num_cached` is
        cached."""
        self._free.sort(reverse=True)  # low slots first: neighbours are computed without copies
        state = SequenceState(self._free.pop())
        if num_blocks:
            key = sequence.block_keys[num_blocks - 1]
            self._kept.move_to_end(key)
            state.source, state.source_end = self._kept[key], num_blocks * self._block_size
        if num_cached > num_blocks:
            state.branch_end = num_cached * self._block_size
        self._running[state.slot] = sequence.state = state

    def end(self, sequence: Sequence) -> None:
        """Takes back the slot of a sequence, if it has one."""
        if sequence.state is not None:
            del self._running[sequence.state.slot]
            self._free.append(sequence.state.slot)
            sequence.state = None

    def plan_saves(self, chunks: Iterable[Chunk]) -> None:
        """Chooses what is kept in a step. The keys of the chunks' full blocks must be known."""
        size = self._block_size
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.start
            state, end = sequence.state, start + chunk.num_tokens
            assert state is not None
            state.saves = ()
            if start > state.source_end:
                state.source = None
            if end - start == 1 and sequence.num_output:
                if end % size == 0:
                    self._drop_one_of([state.answer_key])
                    state.answer_key = sequence.block_keys[end // size - 1]
                    state.saves = self._save(state.answer_key, end)
                continue
            # Whoever brings the same prompt computes its last token again.
            last = min(end, sequence.num_known - 1) // size * size
            for at in sorted({last, state.branch_end}):
                if start < at <= end:
                    state.saves += self._save(sequence.block_keys[at // size - 1], at)

    def audit(self, owners: Iterable[Sequence]) -> None:
        """Asserts that each slot is free, kept, or held by one of `owners`."""
        held = [owner.state.slot for owner in owners if owner.state is not None]
        assert sorted(held) == sorted(self._running)
        slots = [*held, *self._free, *self._blank, *self._kept.values()]
        assert sorted(slots) == list(range(len(slots)))

    def _save(self, key: bytes, end: int) -> tuple[tuple[int, int], ...]:
        """The end and the slot to keep its state in; nothing if it is kept already, or if all slots
        are about to be read."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return ()
        if not self._blank:
            self._drop_one_of(list(self._kept))
        if not self._blank:
            return ()
        slot = self._kept[key] = self._blank.pop()
        return ((end, slot),)

    def _drop_one_of(self, keys: Iterable[bytes]) -> None:
        """Drops the first that is kept and that no running sequence has yet to read."""
        sources = {state.source for state in self._running.values()}
        free = (key for key in keys if self._kept.get(key) not in {None, *sources})
        if (key := next(free, None)) is not None:
            self._blank.append(self._kept.pop(key))
