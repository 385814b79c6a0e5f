"""Hands out a step's tokens under one budget, and blocks with them.

There are no prefill and decode phases: a sequence has one or more pending tokens and gets as many
as fit. Lanes and policy give the order, and `AdmissionCheck` decides on room.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq

from workers.engine.admission_check import AdmissionCheck, AdmissionVerdict, RecentLengths
from workers.engine.block_manager import BlockManager
from workers.engine.cost_model import CostModel
from workers.engine.first_tokens import FirstTokens
from workers.engine.interface import Chunk, EngineLimits, Padding
from workers.engine.order import Lanes, Order, VirtualTokenCounters, WaitingQueue
from workers.engine.sequence import Account, Sequence
from workers.engine.speculation import add_drafts
from workers.engine.step_plan import UNLIMITED, RunningSequences, StepPlan, Streams
from workers.lanes import DEFAULT_LANES, WARM, Lane

_WARM_TOKENS = 128  # of a step that computes for nobody: the job that comes waits for its end
_SMALL_SHARE = 1 / 8  # of the budget: up to here streams are served without sorting


class Scheduler:
    """Running sequences hold blocks; waiting ones hold none.

    Progress is guaranteed if each sequence fits into the blocks alone (the engine refuses others).
    A sequence that was preempted `max_preemptions` times is pinned: it yields blocks only to older
    pinned ones. So the oldest pinned sequence keeps its blocks and may take all others, and ageing
    brings it tokens whatever lanes and policy say.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: EngineLimits,
        lanes: Seq[Lane] = DEFAULT_LANES,
        lengths: RecentLengths | None = None,
    ) -> None:
        self.blocks = blocks
        self.cost = CostModel()
        self._limits = limits
        self._policy = policy = VirtualTokenCounters()
        self._lanes = Lanes(lanes, limits.max_num_batched_tokens)
        self._running = RunningSequences()
        self._below_share_now: Collection[Account] = ()
        self._below_share_at = 0, 0  # change counters of running and waiting sequences then
        self._was_refused = False  # whether the last step lacked room for a sequence
        self._held: set[Sequence] = set()  # running, but late for their next step
        self._first_tokens = FirstTokens()
        self._waiting = WaitingQueue(self._lanes, policy)
        self._admission = AdmissionCheck(
            blocks, limits, self._lanes, lengths or RecentLengths(), self._running
        )

    @property
    def running(self) -> list[Sequence]:
        return list(self._running.sequences)

    @property
    def num_running(self) -> int:
        return len(self._running.sequences)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_lanes(self) -> tuple[str, ...]:
        """Names of the lanes with waiting sequences."""
        return self._waiting.lanes

    def reconfigure(self, limits: EngineLimits, lanes: Seq[Lane]) -> None:
        """Applies from the next step on; running sequences continue."""
        self._limits = self._admission.limits = limits
        self._lanes.replace(lanes, limits.max_num_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """Adds a waiting sequence; `admit` releases it."""
        self._waiting.add(sequence)
        self._lanes.arrive(sequence)
        self._policy.arrive(sequence)
        if self._lanes.of(sequence).max_slowdown is None:
            self._first_tokens.arrive(sequence)

    def admit(self, sequences: Collection[Sequence]) -> None:
        """Releases waiting sequences: they may start when there is room."""
        for sequence in sequences:
            self._waiting.admit(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended or was stopped, and frees its blocks."""
        self.blocks.release(sequence)
        self._running.discard(sequence)
        self._held.discard(sequence)
        self._waiting.discard(sequence)
        self._first_tokens.leave(sequence)
        self._lanes.leave(sequence)
        self._policy.leave(sequence)

    def move(self, sequence: Sequence, lane: str) -> None:
        """Moves a sequence to another lane; it keeps its blocks and tokens."""
        is_waiting, is_queued = sequence in self._waiting, self._waiting.is_queued(sequence)
        self._waiting.discard(sequence)
        self._lanes.leave(sequence)
        self._policy.leave(sequence)
        self._running.move(sequence, lane)
        self._lanes.arrive(sequence)
        self._policy.arrive(sequence)
        if is_waiting:
            self._waiting.add(sequence)
        if is_queued:
            self._waiting.admit(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees its blocks, so its KV must be computed again; it keeps its place in the order."""
        sequence.num_preemptions += 1
        self.blocks.release(sequence)
        self._running.discard(sequence)
        self._held.discard(sequence)
        self._waiting.add(sequence)
        self._waiting.admit(sequence)

    def priority_of(self, sequence: Sequence) -> int:
        """The priority of its lane; the smallest is served first."""
        return self._lanes.of(sequence).priority

    def place(self, sequence: Sequence) -> tuple[float, ...]:
        """A waiting sequence's place in the order; the smallest comes first."""
        return self._lanes.level(sequence), self._policy.key(sequence), sequence.arrival

    def plan(self, now_s: float, num_tokens: int | None = None) -> StepPlan:
        """The next step: level by level, first running, then waiting sequences, as far as they fit.

        `num_tokens`: its budget, if not that of the limits.
        """
        self._held = {sequence for sequence in self._held if sequence.is_held}
        if num_tokens is None:
            num_tokens = self._limits.max_num_batched_tokens
        plan = self._new_plan(num_tokens, now_s)
        plan.is_full = not self._may_enter()
        if not self._put_streams(plan):
            self._put_in_order(plan)
        if self._limits.speculates and self.cost.is_ready and self.blocks.can_share:
            add_drafts(plan, self.blocks)
        self.blocks.plan_saves(plan.chunks.values())
        return plan

    def settle(self, plan: StepPlan, padding: Seq[Padding], step_s: float) -> tuple[int, float]:
        """Learns from a computed step and accounts for it. Returns how many of its tokens had been
        computed before, and the seconds that were predicted for it; 0 without a prediction.
        """
        singles = plan.served_singly
        together = plan.served_together
        predicted_s = 0.0
        if plan.chunks or padding:  # not all of them were held
            predicted_s = self.cost.observe([*singles, *padding], step_s, together.features)
            limited = min(1.0, plan.limited_s / predicted_s) if predicted_s else 0.0
            self._first_tokens.settle(singles, (1.0 - limited) * step_s, self.cost.coefficients[0])
        self._lanes.settle(singles, together.num_by_account)
        self._book_streams(together)
        return sum([self._book(chunk) for chunk in singles]), predicted_s

    def account(self, chunks: Seq[Chunk]) -> int:
        """Does `settle` for chunks that another engine has computed."""
        self._lanes.settle(chunks)
        return sum([self._book(chunk) for chunk in chunks])

    def hold(self, plan: StepPlan, late: Collection[Sequence]) -> None:
        """Holds sequences for which the step drew no token, because their masks were late. They
        take part in no step until they have them. Called before `settle`."""
        plan.put_off(late)
        self._held |= set(late)
        for sequence in late:
            self.blocks.shrink(sequence)

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Accounts for the drafted tokens of a step that were right, as if more steps had computed
        them, and frees the blocks of the others. Called after `settle`."""
        end = sequence.num_computed + num_tokens
        sequence.num_computed = end
        sequence.num_once_computed = max(sequence.num_once_computed, end)
        self._lanes.settle((), {sequence.account: num_tokens})
        self._policy.charge(sequence.account, 0, num_tokens)
        self._cache_blocks(sequence)
        self.blocks.shrink(sequence)

    def _book_streams(self, streams: Streams) -> None:
        """Accounts for streams: one token each, never computed before."""
        self._policy.charge_streams(streams.num_by_account)
        block_size, cache = self.blocks.block_size, self.blocks.cache
        for sequence in streams.sequences:
            end = sequence.num_computed + 1
            sequence.num_computed = sequence.num_once_computed = end
            if end == sequence.num_prompt:  # for example, if all tokens before it were cached
                self._policy.charge(sequence.account, 1, 0)
            if not end % block_size and cache is not None:  # its last block is full
                cache.put(sequence)

    def _book(self, chunk: Chunk) -> int:
        """Returns how much of the chunk had been computed before."""
        sequence, start = chunk.sequence, chunk.start
        end, num_before = start + chunk.num_known, sequence.num_once_computed
        sequence.num_computed = end
        if end > num_before:
            # More than the prompt of a resumed job may have been cached.
            num_in = max(0, min(end, sequence.num_prompt) - max(start, num_before))
            sequence.num_once_computed = end
            self._policy.charge(sequence.account, num_in, int(chunk.samples))
        self._cache_blocks(sequence)
        return max(0, min(end, num_before) - start)

    def _cache_blocks(self, sequence: Sequence) -> None:
        """Puts blocks that are full now into the prefix cache."""
        blocks, num_keyed = self.blocks, sequence.num_keyed
        if blocks.cache and sequence.num_computed >= (num_keyed + 1) * blocks.block_size:
            blocks.cache.put(sequence)

    def _new_plan(self, num_tokens: int, now_s: float) -> StepPlan:
        """Returns a step's limits: tokens, a share of them for prompts, and time.

        The time limit is the tightest latency target of the lanes that have work or had some
        lately: their next request would wait for the step's end. If the streams with a target take
        longer by themselves, all others get as much time as they. Beside lanes without
        `max_slowdown` those with one have less time.
        """
        plan = StepPlan(self.cost, num_tokens)
        plan.streams = streams = self._running.streams(self._held)
        if streams.sequences and self._limits.prefill_share is not None:
            num_prefill = int(self._limits.prefill_share * plan.num_tokens_left)
            plan.num_prefill_left = max(1, num_prefill)
        lanes = self._lanes.live_lately(now_s)
        if not self.cost.is_ready:
            return plan
        if not self._limits.prefill_only:
            self._limit(plan, lanes)
            streams = plan.streams
        targets = {
            name: lane.itl_target_s for name, lane in lanes.items() if lane.itl_target_s is not None
        }
        if targets:
            others = {s: None for s in streams.sequences if s.lane not in targets}
            due = streams.without(others) if others else streams
            plan.has_due_streams = bool(due.sequences)
            allowed_s = max(min(targets.values()), 2 * self.cost.predict(due.features))
            plan.seconds_left = allowed_s - self.cost.coefficients[0]
        plan.streams_s = self.cost.predict_added(streams.features)
        return plan

    def _limit(self, plan: StepPlan, live: Mapping[str, Lane]) -> None:
        """Beside lanes without `max_slowdown`, gives those with one a share of the time that steps
        take for first tokens of the others, and leaves out their streams beyond it."""
        most = {
            name: lane.max_slowdown for name, lane in live.items() if lane.max_slowdown is not None
        }
        if not most or len(most) == len(live):
            return
        has_any = any(self._running.num_in[name] for name in most)
        limited = [s for s in plan.streams.sequences if s.lane in most] if has_any else []
        num_kv = sum([s.num_known for s in limited])
        streams_s = self.cost.predict_added((float(len(limited)), float(num_kv), 0.0))
        token_s = self.cost.predict_added((1.0, 1.0, 0.0))  # the least that they may ask for
        step_s = self._first_tokens.step_s or self.cost.coefficients[0]
        most_s = max(token_s, (min(most.values()) - 1) * step_s)
        plan.limited, plan.limited_s = most.keys(), min(streams_s, most_s)
        plan.limited_s_left = most_s - plan.limited_s
        if streams_s <= most_s:
            return
        num = math.ceil(len(limited) * most_s / streams_s)
        firsts = {s.account: s for s in reversed(limited)}
        places = {account: self.place(first) for account, first in firsts.items()}
        limited.sort(key=lambda s: places[s.account])
        plan.left_out = frozenset(limited[num:])
        plan.streams = plan.streams.without(plan.left_out)

    def _may_enter(self) -> bool:
        """Whether a waiting sequence could start: there is room, or something to preempt for it."""
        first_priority = self._waiting.first_priority
        if first_priority is None:
            return False
        if self._admission.has_room:
            return True
        lanes = [lane for lane, num in self._running.num_in.items() if num]
        if any(self._lanes.priority_of(lane) > first_priority for lane in lanes):
            return True
        return bool(self._below_share())

    def _below_share(self) -> Collection[Account]:
        """Waiting lanes and tenants for which other tenants of their lane must make room."""
        num_changes = self._running.num_changes, self._waiting.num_changes
        if num_changes != self._below_share_at:
            firsts = map(self._waiting.first_of, self._waiting.accounts)
            self._below_share_now = self._running.below_share(firsts)
            self._below_share_at = num_changes
        return self._below_share_now

    def _put_streams(self, plan: StepPlan) -> bool:
        """Gives each stream its token without sorting, if there is room and time for all and they
        are all that runs or take a small share of the budget. Returns whether that is the whole
        step.
        """
        streams = plan.streams.sequences
        num_left_out = len(self._held) + len(plan.left_out)
        is_all = plan.is_full and len(streams) + num_left_out == self.num_running
        most = plan.num_on_offer if is_all else int(_SMALL_SHARE * plan.num_on_offer)
        has_time = plan.streams_s <= plan.seconds_left
        if len(streams) > most or not has_time or not self.blocks.grow_streams(streams):
            return False
        plan.put_streams()
        return is_all

    def _put_in_order(self, plan: StepPlan) -> None:
        """Serves overdue tenants first, then lanes below their minimum share up to their deficit,
        then all others.
        """
        others: list[Sequence] = []
        if len(plan.chunks) < self.num_running:
            taken = self._held | plan.left_out | plan.chunks.keys()
            others = [s for s in self._running.sequences if s not in taken]
        order = Order(others, self._waiting, self._lanes, self._policy)
        overdue = order.walk(until=self._lanes.first_priority)
        plan.is_full = not self._serve(plan, order, overdue, UNLIMITED)
        was_refused, self._was_refused = self._was_refused, False
        if not plan.is_full and (was_refused or not self._admission.has_room):
            self._start_below_share(plan)
        for lane, deficit in self._lanes.deficits().items():
            self._serve(plan, order, order.walk(lane), deficit)
        self._serve(plan, order, order.walk(), UNLIMITED)
        if not plan.chunks:
            plan.lift_limits()
            self._serve(plan, order, order.walk(), UNLIMITED)

    def _serve(self, plan: StepPlan, order: Order, walk: Iterator[Sequence], most: int) -> bool:
        """Hands out up to `most` tokens, and admits waiting sequences up to the first without room.

        No sequence passes one that does not fit; otherwise a large one could wait for ever.
        Returns whether all were admitted.
        """
        plan.num_kept_back = max(0, plan.num_tokens_left - most)
        order.includes_waiting = not plan.is_full
        for sequence in walk:
            if sequence in self._running.sequences:
                if plan.num_on_offer > 0:
                    self._hand_out(plan, sequence)
            elif order.includes_waiting:
                has_tokens = sequence not in plan.preempted and self._has_tokens(plan, sequence)
                if has_tokens or sequence.lane not in plan.limited:
                    order.includes_waiting = has_tokens and self._start(plan, sequence)
                else:
                    order.closed.add(sequence.lane)
        return order.includes_waiting

    def _start_below_share(self, plan: StepPlan) -> None:
        """If room is short, first admits sequences of tenants with too few places in their lane: in
        the policy's order they may be behind many of the tenant with the most.

        It admits one sequence per tenant and round, until places are shared or none is admitted.
        """
        by_weight = self._running.places_by_weight
        has_started = True
        while has_started and plan.num_on_offer > 0:
            has_started = False
            firsts = [self._waiting.first_of(account) for account in self._below_share()]
            firsts.sort(
                key=lambda s: (
                    self._lanes.of(s).priority,
                    by_weight(s.account, s.weight),
                    s.arrival,
                )
            )
            for sequence in firsts:
                if sequence not in plan.preempted and self._has_tokens(plan, sequence):
                    self._start(plan, sequence)
                    has_started |= sequence in self._running.sequences

    def _has_tokens(self, plan: StepPlan, candidate: Sequence) -> bool:
        """Whether the step has tokens left for a waiting sequence. Prompts that are computed whole
        may exceed the budget if they are alone in the step."""
        if self._limits.prefill_only:
            return not plan.chunks or candidate.num_pending <= plan.num_on_offer
        is_due = self._is_due(plan, candidate)
        return plan.num_allowed(candidate.lane, UNLIMITED, 0, is_due=is_due) > 0

    def _start(self, plan: StepPlan, candidate: Sequence) -> bool:
        """Admits the candidate if possible; returns whether sequences after it may be checked."""
        verdict, entry = self._admission.ask(plan, candidate)
        while entry is not None and entry.victims:
            for victim in entry.victims:
                plan.displaced.add(victim)
                self._take_blocks(plan, victim)
            # Blocks that victims shared with each other or the candidate are known only now.
            verdict, entry = self._admission.ask(plan, candidate)
        if entry is None:
            self._was_refused |= verdict is AdmissionVerdict.NO_ROOM
            is_overdue = self._lanes.is_overdue(candidate.account)
            return verdict is AdmissionVerdict.BEING_COMPUTED and not is_overdue
        self._waiting.discard(candidate)
        self._running.add(candidate)
        copy_from = self._admission.enter(plan, candidate, entry)
        self._hand_out(plan, candidate, copy_from)
        return True

    def _hand_out(self, plan: StepPlan, sequence: Sequence, copy_from: int | None = None) -> None:
        """Gives a running sequence its pending tokens, up to the budget and the free blocks.

        Without room for one token, sequences of higher rank are preempted. If there are none, it
        keeps its blocks and gets no token in this step.
        """
        is_common = copy_from is None and self.blocks.has_next_slot(sequence)
        is_common = is_common and sequence not in plan.chunks
        if is_common and (plan.has_time_for(sequence) or self._is_due(plan, sequence)):
            plan.put_stream(sequence)
            return
        num_planned = plan.num_planned(sequence)
        num_wanted = self._num_wanted(plan, sequence)
        if num_wanted == 0 and copy_from is None:
            return
        while not self.blocks.can_grow(sequence, num_planned + 1):
            victim = self._worst_below(sequence)
            if victim is None:
                return
            self._take_blocks(plan, victim)
            num_wanted = self._num_wanted(plan, sequence)
        num_tokens = min(num_wanted, self.blocks.num_growable(sequence) - num_planned)
        if copy_from is not None:
            num_tokens = max(1, num_tokens)  # the block must be copied in this step
        self.blocks.grow(sequence, num_planned + num_tokens)
        plan.put(sequence, num_tokens, copy_from)

    def _num_wanted(self, plan: StepPlan, sequence: Sequence) -> int:
        """Pending tokens of the sequence that the step still allows."""
        num_planned = plan.num_planned(sequence)
        if self._limits.prefill_only:
            return sequence.num_pending - num_planned
        num_pending = sequence.num_pending - num_planned
        if sequence.lane == WARM.name:
            num_pending = min(num_pending, _WARM_TOKENS - num_planned)
        return plan.num_allowed(
            sequence.lane,
            num_pending,
            sequence.num_computed + num_planned,
            is_due=self._is_due(plan, sequence),
        )

    def _is_due(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Whether the time limit does not apply to it: it is a stream with a latency target, or a
        prompt with one while there is no such stream."""
        if sequence.lane in plan.limited:
            return False
        is_first = sequence.num_pending == 1 or not plan.has_due_streams
        return is_first and self._target_s_of(sequence) is not None

    def _target_s_of(self, sequence: Sequence) -> float | None:
        return self._lanes.of(sequence).itl_target_s

    def _worst_below(self, sequence: Sequence) -> Sequence | None:
        """The sequence to preempt for this one: of the worst level, the least computed."""
        own_rank = self._rank(sequence)
        below = [s for s in self._running.sequences if s.block_ids and self._rank(s) > own_rank]
        return max(
            below,
            key=lambda s: (
                not self._admission.is_pinned(s),
                self._lanes.level(s),
                -s.num_computed,
                self._rank(s),
            ),
            default=None,
        )

    def _rank(self, sequence: Sequence) -> tuple[float, ...]:
        """A unique rank; a sequence may take blocks from those of higher rank."""
        if self._admission.is_pinned(sequence):
            return (0.0, sequence.arrival)
        return (1.0, *self.place(sequence))

    def _take_blocks(self, plan: StepPlan, victim: Sequence) -> None:
        plan.take_back(victim)
        self._admission.forget(victim)
        self.preempt(victim)
