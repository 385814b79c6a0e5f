"""Hands out a step's tokens under one budget, and blocks with them.

Knows no phases: a sequence has pending tokens, one or many, and gets as many as fit. The order
comes from lanes and policy, the verdict on room from `AdmissionCheck`; `Books` records what was
computed. Over 300 lines: dividing one step is one calculation.
"""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

from workers.engine.admission_check import AdmissionCheck, AdmissionVerdict
from workers.engine.block_manager import BlockManager
from workers.engine.books import Books
from workers.engine.cost_model import CostModel
from workers.engine.lanes import DEFAULT_LANES, Lane, Lanes
from workers.engine.lengths import KnownOnly, LengthPredictor
from workers.engine.limits import EngineLimits
from workers.engine.model import Padding
from workers.engine.order import Order
from workers.engine.policies import Key, Policy
from workers.engine.running import Running
from workers.engine.sequence import Account, Sequence
from workers.engine.step_plan import UNLIMITED, StepPlan
from workers.engine.waiting_queue import WaitingQueue

_SMALL_SHARE = 1 / 8  # of the budget, which streams may take before anyone's turn


class Scheduler:
    """Running sequences hold blocks; waiting ones hold none.

    Progress is certain as long as each sequence fits into the blocks alone (the engine refuses
    the others). Who has been preempted `max_preemptions` times is pinned: it yields blocks only
    to pinned ones that came before it. So in the end the oldest pinned sequence keeps its blocks
    and may take all others', and age brings it its tokens whatever lanes and policy say.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: EngineLimits,
        policy: Policy,
        lanes: Seq[Lane] = DEFAULT_LANES,
        lengths: LengthPredictor | None = None,
    ) -> None:
        self.blocks = blocks
        self.cost = CostModel()
        self._limits = limits
        self._policy = policy
        self._lanes = Lanes(lanes, limits.max_num_batched_tokens)
        self._books = Books(self._lanes, policy, blocks)
        self._running = Running()
        self._below_share_now: Collection[Account] = ()
        self._below_share_at = (0, 0)  # changes of those who run and wait, when it was found
        self._was_refused = False  # whether the last step had no room for somebody
        self._waiting = WaitingQueue(self._lanes, policy)
        self._admission = AdmissionCheck(
            blocks, limits, self._lanes, lengths or KnownOnly(), self._running
        )

    @property
    def running(self) -> list[Sequence]:
        return list(self._running.sequences)

    @property
    def num_running(self) -> int:
        return len(self._running.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_lanes(self) -> tuple[str, ...]:
        """Of those that wait, by name."""
        return self._waiting.lanes

    def reconfigure(self, limits: EngineLimits, lanes: Seq[Lane]) -> None:
        """From the next step on; what runs goes on."""
        self._limits = self._admission.limits = limits
        self._lanes.replace(lanes, limits.max_num_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """It waits, until it is let in and there is room."""
        self._waiting.add(sequence)
        self._lanes.arrive(sequence)
        self._policy.arrive(sequence)

    def let_in(self, sequences: Collection[Sequence], now_s: float) -> None:
        """From now on they may run."""
        for sequence in sequences:
            self._waiting.let_in(sequence, now_s)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended or was stopped, and takes its blocks."""
        self.blocks.release(sequence)
        self._running.discard(sequence)
        self._waiting.discard(sequence)
        self._lanes.leave(sequence)
        self._policy.leave(sequence)

    def move(self, sequence: Sequence, lane: str, now_s: float) -> None:
        """Puts a sequence into another lane, with all that it has."""
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
            self._waiting.let_in(sequence, now_s)

    def preempt(self, sequence: Sequence, now_s: float) -> None:
        """Blocks and computed tokens go; known tokens and the place in the order stay."""
        sequence.num_preemptions += 1
        self.blocks.release(sequence)
        self._running.discard(sequence)
        self._waiting.add(sequence)
        self._waiting.let_in(sequence, now_s)

    def place(self, sequence: Sequence, now_s: float) -> Key:
        """A waiting sequence's place in the order; the smallest comes first."""
        key = self._policy.key(sequence, now_s)
        return (self._lanes.level(sequence), *key, sequence.arrival)

    def plan(self, now_s: float, num_reserved: int = 0) -> StepPlan:
        """The next step: level by level, in each the running, then the waiting, with what fits.

        `num_reserved` tokens of the budget are spoken for.
        """
        plan = self._new_plan(self._limits.max_num_batched_tokens - num_reserved)
        plan.is_full = not self._may_enter()
        if not self._put_streams(plan):
            self._put_in_order(plan, now_s)
        if self._limits.grows_ahead:
            self._grow_ahead(plan)
        return plan

    def settle(self, plan: StepPlan, padding: Seq[Padding], step_s: float) -> int:
        """Learns from a step that is over, and books it; returns how many of its tokens had been
        computed before.
        """
        self.cost.observe([*plan.served_singly, *padding], step_s, plan.served_together.features)
        return self._books.settle(plan)

    def _grow_ahead(self, plan: StepPlan) -> None:
        """For a model that starts the next step before the engine asks for it."""
        for sequence, chunk in plan.chunks.items():
            end = chunk.start + chunk.num_tokens
            if end % self.blocks.block_size or not chunk.samples:
                continue  # its next token goes where this one does, or is known
            if sequence.num_output + 1 < sequence.max_output:
                self.blocks.grow_ahead(sequence, end)

    def _new_plan(self, num_tokens: int) -> StepPlan:
        """What the step may take: tokens, a share of them for prompts, and time.

        The time is the tightest target of the streams that run. A target that the streams miss
        by themselves is not met by stopping all else: then prompts get as long as streams.
        """
        plan = StepPlan(self.cost, num_tokens)
        plan.streams = streams = self._running.streams()
        if streams.sequences and self._limits.prefill_share is not None:
            num_prefill = int(self._limits.prefill_share * plan.num_tokens_left)
            plan.num_prefill_left = max(1, num_prefill)
        lanes = {lane for lane, _ in streams.num_by_account}
        targets = {self._lanes.itl_target_s_of(lane) for lane in lanes} - {None}
        if targets and self.cost.is_ready:
            streams_s = self.cost.predict(streams.features)
            allowed_s = max(min(t for t in targets if t is not None), 2 * streams_s)
            plan.seconds_left = allowed_s - self.cost.coefficients[0]
            plan.streams_s = streams_s - self.cost.coefficients[0]
        return plan

    def _may_enter(self) -> bool:
        """Whether anyone who waits could be let in: there is room, or someone who must make it."""
        first_priority = self._waiting.first_priority
        if first_priority is None:
            return False
        if self._admission.has_room:
            return True
        lanes = {lane for lane, _ in self._running.by_account}
        if any(self._lanes.priority_of(lane) > first_priority for lane in lanes):
            return True
        return bool(self._below_share())

    def _below_share(self) -> Collection[Account]:
        """Of those who wait, the lanes and tenants that others must make room for in their lane."""
        num_changes = self._running.num_changes, self._waiting.num_changes
        if num_changes != self._below_share_at:
            firsts = map(self._waiting.first_of, self._waiting.accounts)
            self._below_share_now = self._running.below_share(firsts)
            self._below_share_at = num_changes
        return self._below_share_now

    def _put_streams(self, plan: StepPlan) -> bool:
        """Gives all streams their token, where there is enough for all, and where they are all
        there is, or take little from the others: whose turn it is hardly matters then. Returns
        whether that is the whole step.

        They have the time in any case: see `_new_plan`.
        """
        streams = plan.streams.sequences
        is_all = plan.is_full and len(streams) == self.num_running
        most = plan.num_on_offer if is_all else int(_SMALL_SHARE * plan.num_on_offer)
        if len(streams) > most or not self.blocks.grow_streams(streams):
            return False
        plan.put_streams()
        return is_all

    def _put_in_order(self, plan: StepPlan, now_s: float) -> None:
        """Lanes behind their minimum share come first, with what they are owed; and before them
        who is overdue.
        """
        others: list[Sequence] = []
        if len(plan.chunks) < self.num_running:
            others = [s for s in self._running.sequences if s not in plan.chunks]
        order = Order(others, self._waiting, self._lanes, self._policy, now_s)
        overdue = order.walk(until=self._lanes.first_priority)
        plan.is_full = not self._serve(plan, order, overdue, UNLIMITED, now_s)
        was_refused, self._was_refused = self._was_refused, False
        if not plan.is_full and (was_refused or not self._admission.has_room):
            self._admit_below_share(plan, now_s)
        for lane, num_owed in self._lanes.owed().items():
            self._serve(plan, order, order.walk(lane), num_owed, now_s)
        self._serve(plan, order, order.walk(), UNLIMITED, now_s)
        if not plan.chunks:
            plan.lift_limits()
            self._serve(plan, order, order.walk(), UNLIMITED, now_s)

    def _serve(
        self, plan: StepPlan, order: Order, walk: Iterator[Sequence], most: int, now_s: float
    ) -> bool:
        """Hands out up to `most` tokens, and admits up to the first that must wait.

        No one passes a sequence that does not fit: otherwise a large one could wait for ever.
        Returns whether all were admitted that asked.
        """
        plan.num_kept_back = max(0, plan.num_tokens_left - most)
        order.names_waiting = not plan.is_full
        for sequence in walk:
            if sequence in self._running.sequences:
                if plan.num_on_offer > 0:
                    self._hand_out(plan, sequence, now_s)
            elif order.names_waiting:
                is_full = sequence in plan.preempted or plan.num_for_prompts == 0
                order.names_waiting = not is_full and self._admit(plan, sequence, now_s)
        return order.names_waiting

    def _admit_below_share(self, plan: StepPlan, now_s: float) -> None:
        """Where room is short, lets in those first whose tenant has too few places in its lane:
        in the policy's order they may stand behind many of the tenant that has most.

        In turns, until places are shared or nobody is let in.
        """
        by_weight = self._running.places_by_weight
        has_admitted = True
        while has_admitted and plan.num_for_prompts > 0:
            has_admitted = False
            firsts = [self._waiting.first_of(account) for account in self._below_share()]
            firsts.sort(key=lambda s: (self._lanes.of(s).priority, by_weight(s.account, s.weight)))
            for sequence in firsts:
                if sequence not in plan.preempted and plan.num_for_prompts > 0:
                    self._admit(plan, sequence, now_s)
                    has_admitted |= sequence in self._running.sequences

    def _admit(self, plan: StepPlan, candidate: Sequence, now_s: float) -> bool:
        """Lets the candidate in, or not; returns whether others may be asked after it."""
        verdict, entry = self._admission.ask(plan, candidate)
        while entry is not None and entry.victims:
            for victim in entry.victims:
                self._take_blocks(plan, victim, now_s)
            # What victims shared, with each other or with the candidate, is known only now.
            verdict, entry = self._admission.ask(plan, candidate)
        if entry is None:
            self._was_refused |= verdict is AdmissionVerdict.NO_ROOM
            is_overdue = self._lanes.is_overdue(candidate.account)
            return verdict is AdmissionVerdict.BEING_COMPUTED and not is_overdue
        self._waiting.discard(candidate)
        self._running.add(candidate)
        if candidate.started_s is None:
            candidate.started_s = now_s
        copy_from = self._admission.enter(plan, candidate, entry)
        self._hand_out(plan, candidate, now_s, copy_from)
        return True

    def _hand_out(
        self, plan: StepPlan, sequence: Sequence, now_s: float, copy_from: int | None = None
    ) -> None:
        """Gives a running sequence what it needs, up to the budget and the free blocks.

        Without room for one token, worse ones lose their blocks to it; where there is none
        worse, it waits with its blocks and with what it has computed.
        """
        is_common = copy_from is None and self.blocks.has_next_slot(sequence)
        is_common = is_common and sequence not in plan.chunks
        if is_common and (plan.has_time_for(sequence) or self._is_due(sequence)):
            plan.put_stream(sequence)
            return
        num_planned = plan.num_planned(sequence)
        if self._num_wanted(plan, sequence) == 0 and copy_from is None:
            return
        while not self.blocks.can_grow(sequence, num_planned + 1):
            victim = self._worst_below(sequence, now_s)
            if victim is None:
                return
            self._take_blocks(plan, victim, now_s)
        num_room = self.blocks.num_growable(sequence) - num_planned
        num_tokens = min(self._num_wanted(plan, sequence), num_room)
        if copy_from is not None:
            num_tokens = max(1, num_tokens)  # what is not copied now cannot be copied later
        self.blocks.grow(sequence, num_planned + num_tokens)
        plan.put(sequence, num_tokens, copy_from)

    def _num_wanted(self, plan: StepPlan, sequence: Sequence) -> int:
        """Tokens that the sequence needs and the step still has for it."""
        num_planned = plan.num_planned(sequence)
        return plan.num_allowed(
            sequence.num_pending - num_planned,
            sequence.num_computed + num_planned,
            is_due=self._is_due(sequence),
        )

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether it is a stream with a target, which waits for no time."""
        return sequence.num_pending == 1 and self._lanes.of(sequence).itl_target_s is not None

    def _worst_below(self, sequence: Sequence, now_s: float) -> Sequence | None:
        """Who must give its blocks to the sequence: of the worst level, the least to lose."""
        own_rank = self._rank(sequence, now_s)
        below = [
            s for s in self._running.sequences if s.block_ids and self._rank(s, now_s) > own_rank
        ]
        return max(
            below,
            key=lambda s: (
                not self._admission.is_pinned(s),
                self._lanes.level(s),
                -s.num_computed,
                self._rank(s, now_s),
            ),
            default=None,
        )

    def _rank(self, sequence: Sequence, now_s: float) -> Key:
        """Who may take blocks from whom: from those of higher rank. Differs between any two."""
        if self._admission.is_pinned(sequence):
            return (0.0, sequence.arrival)
        return (1.0, *self.place(sequence, now_s))

    def _take_blocks(self, plan: StepPlan, victim: Sequence, now_s: float) -> None:
        plan.take_back(victim)
        self._admission.forget(victim)
        self.preempt(victim, now_s)
