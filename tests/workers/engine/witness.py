"""Checks each step against the limits in docs/engine.md, with its own accounting.

It knows what the supervisor sees (jobs, lanes, tokens), blocks, and admissions, but nothing of
the scheduler's levels and credits.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tests.workers.engine.harness import MAX_MODEL_LEN, Harness
from workers.engine.interface import Chunk
from workers.engine.sequence import Sequence
from workers.lanes import STANDARD, Lane

Account = tuple[str, str]  # lane and tenant


@dataclass
class Overdue:
    """A tenant whose turn it is: the tokens that others have had since, and their maximum."""

    num_passed: int = 0
    num_allowed: int = 0


class Witness:
    """Examines each step before the model runs it: `harness.watch`."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._num_computed = 0
        self._served_at: dict[Account, int] = {}
        self._overdue: dict[Account, Overdue] = {}
        self._held: set[Sequence] = set()

    def look(self) -> None:
        """Between two commands to the engine: records which sequences exist and hold blocks."""
        sequences = self._harness.engine.sequences
        accounts = {account_of(s) for s in sequences}
        self._held = {s for s in sequences if s.block_ids}
        self._served_at = {
            account: self._served_at.get(account, self._num_computed) for account in accounts
        }

    def forget_turns(self) -> None:
        """The lanes have changed, so the limits start anew."""
        self._overdue.clear()

    def watch(self, chunks: Seq[Chunk]) -> None:
        served = {account_of(chunk.sequence) for chunk in chunks}
        holders = [s for s in self._harness.engine.sequences if s.block_ids]
        admitted = [s for s in holders if s not in self._held]
        self._hold_high_water(holders, admitted)
        self._hold_order(admitted)
        self._hold_turns(chunks, admitted, served)
        self._num_computed += sum(chunk.num_tokens for chunk in chunks)
        self._served_at |= dict.fromkeys(served, self._num_computed)

    def _hold_high_water(self, holders: list[Sequence], admitted: list[Sequence]) -> None:
        """Admissions stop below the mark, except for one sequence in an empty engine."""
        sizes = self._harness.sizes
        num_used = len({block_id for s in holders for block_id in s.block_ids})
        if admitted and len(holders) > 1:
            assert num_used <= int(sizes.kv_high_water * sizes.num_blocks)

    def _hold_order(self, admitted: list[Sequence]) -> None:
        """Within a tenant, no sequence passes one that arrived earlier. Checked only if blocks
        are not shared: a sequence that waits for another's block is passed."""
        if self._harness.sizes.prefix_caching:
            return
        for sequence in self._waiting():
            if sequence.params.n > 1 or sequence in self._held:
                continue
            peers = [s for s in admitted if account_of(s) == account_of(sequence)]
            assert all(peer.arrival < sequence.arrival for peer in peers), "passed by a later one"

    def _hold_turns(
        self, chunks: Seq[Chunk], admitted: list[Sequence], served: set[Account]
    ) -> None:
        """Before an overdue tenant, only running sequences and tenants unserved for longer are
        served."""
        ready = {account_of(s) for s in self._waiting()}
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        for account, since in self._served_at.items():
            is_overdue = self._num_computed - since >= self._num_until_overdue(account)
            if not is_overdue or account in served or account not in ready:
                self._overdue.pop(account, None)
                continue
            turn = self._overdue.get(account)
            if turn is None:
                held = sum(map(num_tokens_of, self._held))
                turn = self._overdue[account] = Overdue(num_allowed=held)
            for sequence in admitted:
                assert self._served_at[account_of(sequence)] <= since, "passed by a later tenant"
            turn.num_allowed += sum(map(num_tokens_of, admitted))
            turn.num_passed += num_tokens
            assert turn.num_passed <= turn.num_allowed, "starved"

    def _waiting(self) -> list[Sequence]:
        """Admitted by their strategy, without blocks."""
        engine = self._harness.engine
        admit = engine._batches._batch_of
        return [s for s in engine.sequences if not s.block_ids and s in admit]

    def _num_until_overdue(self, account: Account) -> int:
        lanes: dict[str, Lane] = {lane.name: lane for lane in self._harness.lanes}
        first = min(lane.priority for lane in (*lanes.values(), STANDARD))
        lane = lanes[account[0]]
        return (lane.priority - first + 1) * lane.ageing_tokens


def account_of(sequence: Sequence) -> Account:
    return sequence.lane, sequence.tenant


def num_tokens_of(sequence: Sequence) -> int:
    """The maximum that one run of a sequence computes."""
    return min(sequence.num_prompt + sequence.max_output, MAX_MODEL_LEN)
