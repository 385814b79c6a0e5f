"""Decides whether a waiting sequence may start now, with which blocks, and which running sequences
are preempted for it. The scheduler decides in which order sequences are checked.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from workers.engine.block_manager import BlockManager
from workers.engine.interface import EngineLimits
from workers.engine.order import Lanes
from workers.engine.sequence import Sequence
from workers.engine.step_plan import RunningSequences, StepPlan, prefix_found

_MAX_NUM_HISTORIES = 1024
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are evenly spread


class RecentLengths:
    """Samples from recent output lengths of (tenant, lane) that exceed the current output.

    Each sequence samples at its own fixed quantile, spread evenly over sequences, so that sums are
    right without a random generator. A sequence longer than all recorded ones is predicted to be
    halfway. With too few records the lane's history is used, then the global one. Without any,
    nothing is reserved: preemption corrects that. `max_tokens` and the context are never exceeded.

    A length that the caller expects raises the prediction.
    """

    def __init__(self, num_kept: int = 512, num_needed: int = 8) -> None:
        self._num_kept = num_kept
        self._num_needed = num_needed
        self._histories: OrderedDict[tuple[str, ...], _History] = OrderedDict()
        self._telling: dict[tuple[str, ...], _History] = {}  # those with enough records

    def predict(self, sequence: Sequence) -> int:
        """Total output tokens of the sequence, at least those it has."""
        num_output = len(sequence.token_ids) - sequence.num_prompt
        told = num_output
        if expected := sequence.params.expected_tokens:
            longer = expected if expected > num_output else 2 * num_output + 1
            told = min(sequence.max_output, longer)
        history = (
            self._telling.get((sequence.lane, sequence.tenant))
            or self._telling.get((sequence.lane,))
            or self._telling.get(())
        )
        if history is None:
            return told
        place = (sequence.arrival + 1) * _GOLDEN % 1.0
        return max(told, min(sequence.max_output, history.draw(place, over=num_output)))

    def observe(self, sequence: Sequence) -> None:
        """Learns from a sequence that ended by itself."""
        for names in ((sequence.lane, sequence.tenant), (sequence.lane,), ()):
            history = self._histories.get(names)
            if history is None:
                history = self._histories[names] = _History(self._num_kept)
            history.add(sequence.num_output)
            self._histories.move_to_end(names)
            if history.num_seen >= self._num_needed:
                self._telling[names] = history
        while len(self._histories) > _MAX_NUM_HISTORIES:
            oldest, _ = self._histories.popitem(last=False)
            self._telling.pop(oldest, None)


class _History:
    """The last lengths, ordered by time and by size."""

    def __init__(self, num_kept: int) -> None:
        self._recent: deque[int] = deque(maxlen=num_kept)
        self._sorted: list[int] = []

    @property
    def num_seen(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)

    def draw(self, place: float, over: int) -> int:
        """The length at quantile `place` (0 to below 1) among those over `over`."""
        first = bisect_right(self._sorted, over)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return 2 * over + 1
        return self._sorted[first + int(place * num_longer)]


class Need(NamedTuple):
    """Blocks of a sequence's known tokens, and how it is predicted to grow."""

    num_more: int  # tokens
    num_blocks: int
    num_spare: int  # slots that its known tokens leave in their last block


class KVForecast:
    """The most blocks that the running sequences will need, by the lengths of recent outputs of the
    same tenant and lane. After LightLLM's Past-Future scheduler (ASPLOS 2025).

    Created in every step that admits a sequence. It looks at each running sequence once, and again
    only if all of them at their longest would not fit.
    """

    def __init__(
        self, blocks: BlockManager, lengths: RecentLengths, running: Collection[Sequence]
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._running = set(running)
        self._entered: dict[Sequence, Need] = {}  # admitted in this step
        num_blocks, num_full, size = 0, 0, blocks.block_size
        for sequence in running:
            num_blocks += -(-len(sequence.token_ids) // size)
            num_full += -(-self._foresee(sequence) // size)
        self._num_blocks = num_blocks
        self._num_full = num_full  # an upper bound: all at their ends at once
        self._num_shared = blocks.num_shared  # shared blocks count once

    def _foresee(self, sequence: Sequence) -> int:
        """Its total tokens; predicts them again if it has reached its earlier prediction."""
        if sequence.num_foreseen <= len(sequence.token_ids):
            sequence.num_foreseen = sequence.num_prompt + self._lengths.predict(sequence)
        return sequence.num_foreseen

    def need(self, sequence: Sequence, num_held: int = 0) -> Need:
        """The need of a sequence that already has `num_held` blocks."""
        num_known = len(sequence.token_ids)
        num_blocks = self._blocks.num_blocks_for(num_known)
        num_spare = num_blocks * self._blocks.block_size - num_known
        return Need(self._foresee(sequence) - num_known, num_blocks - num_held, num_spare)

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

        When a sequence ends, all that last longer have as many more tokens as it had, so the
        maximum is reached at the end of one of them.
        """
        needs = [self._need_of(s) for s in self._running if s not in yielding]
        needs.append(new)
        needs.sort(reverse=True)
        num_peak = num_blocks = 0
        spare: list[int] = []  # of those that last as long, sorted
        for need in needs:
            num_blocks += need.num_blocks
            insort(spare, need.num_spare)
            num_each, num_left = divmod(need.num_more, self._blocks.block_size)
            num_grown = num_each * len(spare) + bisect_left(spare, num_left)
            num_peak = max(num_peak, num_blocks + num_grown)
        return num_peak - self._num_shared

    def _num_full_of(self, need: Need) -> int:
        """The number of blocks at its predicted end."""
        return need.num_blocks + self._blocks.num_blocks_for(need.num_more - need.num_spare)


class AdmissionVerdict(Enum):
    """The answer to a sequence that could start."""

    ADMIT = auto()
    BEING_COMPUTED = auto()  # another sequence computes its next block in this step
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class Entry:
    """What an admitted sequence starts with, and what is preempted for it."""

    need: Need
    victims: list[Sequence]
    found_ids: list[int]  # cached blocks of its prefix
    source: Sequence | None = None  # a choice of the same prompt of its job
    num_forked: int = 0  # tokens shared with the source


@dataclass(eq=False)
class AdmissionCheck:
    """Admits sequences within the limits, the high-water mark and the forecast of KV blocks."""

    _blocks: BlockManager
    limits: EngineLimits
    _lanes: Lanes
    _lengths: RecentLengths
    _running: RunningSequences  # the scheduler's, which changes

    def __post_init__(self) -> None:
        self._forecast: KVForecast | None = None
        self._plan: StepPlan | None = None

    @property
    def has_room(self) -> bool:
        """Whether there is a place, and a block under the high-water mark. Otherwise admission
        needs a preemption."""
        num_running = len(self._running.sequences)
        num_allowed = int(self.limits.kv_high_water * self._blocks.num_blocks)
        return num_running == 0 or (
            num_running < self.limits.max_num_seqs and self._blocks.num_used < num_allowed
        )

    def is_pinned(self, sequence: Sequence) -> bool:
        """Whether it has been preempted `max_preemptions` times."""
        return sequence.num_preemptions >= self.limits.max_preemptions

    def ask(self, plan: StepPlan, candidate: Sequence) -> tuple[AdmissionVerdict, Entry | None]:
        """The verdict, with an entry if it is ADMIT. Changes nothing."""
        forecast = self._look_at(plan)
        found_ids: list[int] = []
        leader = None
        if not candidate.scores_prompt:
            found_ids = self._blocks.find(candidate)
            leader = self._leading_choice(plan, candidate)
            if self._is_being_computed(plan, candidate, leader, len(found_ids)):
                return AdmissionVerdict.BEING_COMPUTED, None
        entry = self._entry(candidate, leader, found_ids, forecast)
        return (
            (AdmissionVerdict.NO_ROOM, None) if entry is None else (AdmissionVerdict.ADMIT, entry)
        )

    def enter(self, plan: StepPlan, sequence: Sequence, entry: Entry) -> int | None:
        """Gives the sequence its first blocks; returns the block to copy from, if any."""
        copy_from = None
        if entry.source is not None:
            copy_from = self._blocks.fork(sequence, entry.source, entry.num_forked)
        else:
            self._blocks.share(sequence, entry.found_ids)
            sequence.num_keyed = len(entry.found_ids)
        if self._blocks.cache is not None:
            self._blocks.cache.begin(sequence)
        plan.num_prefix_queries += sequence.num_known
        plan.num_prefix_hits += sequence.num_computed
        plan.prefixes += prefix_found(sequence, sequence.num_computed)
        assert self._forecast is not None
        self._forecast.add(sequence, entry.need)
        return copy_from

    def forget(self, victim: Sequence) -> None:
        """Drops a sequence, which is about to lose its blocks, from the step's forecast."""
        if self._forecast is not None:
            self._forecast.drop(victim)

    def _look_at(self, plan: StepPlan) -> KVForecast:
        if self._plan is not plan or self._forecast is None:
            self._plan, running = plan, self._running.sequences
            self._forecast = KVForecast(self._blocks, self._lengths, running)
        return self._forecast

    def _leading_choice(self, plan: StepPlan, candidate: Sequence) -> Sequence | None:
        """The running choice of the candidate's prompt with the most computed tokens.

        Excludes choices whose last block is copied in this step, as it has no content yet.
        """
        if candidate.params.n == 1 or not self._blocks.can_share:
            return None
        job, prompt = (candidate.job_id, candidate.epoch), candidate.prompt_number
        choices = [
            s
            for s in self._running.sequences
            if (s.job_id, s.epoch) == job
            and s.prompt_number == prompt
            and s.block_ids
            and not plan.is_copy(s)
        ]
        return max(choices, key=lambda s: s.num_computed, default=None)

    def _is_being_computed(
        self, plan: StepPlan, candidate: Sequence, leader: Sequence | None, num_found: int
    ) -> bool:
        """Whether another sequence computes a block in this step that the candidate needs."""
        block_size = self._blocks.block_size
        if leader is not None and leader in plan.chunks:
            num_computed = max(leader.num_computed, num_found * block_size)
            if _num_common(leader, candidate) - num_computed >= block_size:
                return True
        cache = self._blocks.cache
        return cache is not None and cache.computes_next(candidate, num_found) in plan.chunks

    def _entry(
        self,
        candidate: Sequence,
        leader: Sequence | None,
        found_ids: list[int],
        forecast: KVForecast,
    ) -> Entry | None:
        """How the candidate could start; None if there is no room."""
        held_ids, num_forked = found_ids, 0
        if leader is not None:
            num_forked = self._num_forkable(leader, candidate)
            if num_forked > len(found_ids) * self._blocks.block_size:
                held_ids = leader.block_ids[: num_forked // self._blocks.block_size]
            else:
                leader = None
        need = forecast.need(candidate, self._blocks.num_held(held_ids))
        victims = self._victims(candidate, need, forecast)
        if victims is None:
            return None
        return Entry(need, victims, found_ids, leader, num_forked)

    def _num_forkable(self, leader: Sequence, candidate: Sequence) -> int:
        """How many of the leader's computed tokens the candidate can share."""
        num_common = min(leader.num_computed, _num_common(leader, candidate))
        if not self._blocks.can_fork(num_common):
            num_common -= num_common % self._blocks.block_size
        return num_common

    def _victims(
        self, candidate: Sequence, need: Need, forecast: KVForecast
    ) -> list[Sequence] | None:
        """The sequences to preempt for the candidate, empty if there is room; None if it must wait.

        Sequences of lower-priority lanes are preempted first, those with the fewest computed tokens
        before others; pinned ones never. Their future growth is not counted, as they can also be
        preempted later. If they do not suffice, sequences of the candidate's own lane follow (see
        `_above_share`). A candidate always starts if nothing else runs.
        """
        num_running, num_blocks = len(self._running.sequences), self._blocks.num_blocks
        num_places_lacking = num_running + 1 - self.limits.max_num_seqs
        num_allowed = int(self.limits.kv_high_water * num_blocks)
        num_lacking = forecast.num_known(need) - num_allowed
        is_room = num_places_lacking <= 0 and num_lacking <= 0
        grows_at_will = forecast.num_at_most(need) <= num_blocks
        if num_running == 0 or (is_room and grows_at_will):
            return []
        yielding = self._yielding_to(candidate)
        may_grow = grows_at_will or forecast.peak(need, set(yielding)) <= num_blocks
        if is_room and may_grow:
            return []
        above_share = self._above_share(candidate)
        yielding.sort(key=lambda s: (-self._lanes.of(s).priority, s.num_computed, -s.arrival))
        for num_victims, victim in enumerate(yielding, start=1):
            num_lacking -= forecast.num_blocks_of(victim)
            is_room = num_places_lacking <= num_victims and num_lacking <= 0
            if num_victims == num_running or (is_room and may_grow):
                return yielding[:num_victims]
        for num_equals, victim in enumerate(above_share, start=1):
            num_lacking -= forecast.num_blocks_of(victim)
            num_victims = len(yielding) + num_equals
            if num_places_lacking <= num_victims and num_lacking <= 0:
                victims = yielding + above_share[:num_equals]
                if grows_at_will or forecast.peak(need, set(victims)) <= num_blocks:
                    return victims
        return None

    def _above_share(self, candidate: Sequence) -> list[Sequence]:
        """Sequences in the candidate's lane that may be preempted for it: of the tenant with the
        most places for its weight, those with the fewest computed tokens first. Pinned ones are
        excluded, and the tenant keeps at least as many places for its weight as the candidate's
        tenant will have, so that displaced sequences cannot displace in turn.
        """
        running = self._running
        largest = running.most_places(candidate.account, candidate.weight)
        if largest is None or self._lanes.is_overdue(largest):
            return []
        places = running.by_account[largest]
        num_kept = running.weight_of(largest) * running.places_by_weight(
            candidate.account, candidate.weight, 1
        )
        others = [s for s in places if not self.is_pinned(s)]
        others.sort(key=lambda s: (s.num_computed, -s.arrival))
        return others[: len(places) - math.ceil(num_kept)]

    def _yielding_to(self, candidate: Sequence) -> list[Sequence]:
        """Running sequences of lower-priority lanes that may be preempted for the candidate.
        Excludes pinned ones and those of overdue tenants.
        """
        lanes, priority = self._lanes, self._lanes.of(candidate).priority
        yielding = [
            running
            for account, running in self._running.by_account.items()
            if lanes.priority_of(account[0]) > priority and not lanes.is_overdue(account)
        ]
        return [s for running in yielding for s in running if not self.is_pinned(s)]


def _num_common(leader: Sequence, candidate: Sequence) -> int:
    """Tokens that two choices of a prompt share. The candidate's last token is always computed."""
    return min(leader.num_prompt, candidate.num_known - 1)
