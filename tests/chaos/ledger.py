"""The ledger: each job's expected output, the observed output, and every difference between them.

Knows nothing of processes or HTTP. Its input are observations; its output are violations, each of
one kind. Tokens are compared as ids; no text is kept. Callbacks are checked in
tests/chaos/deliveries.py.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from contract.events import End, LogEntry, Tokens
from contract.jobs import TERMINAL_STATUSES, Job, JobStatus

Output = Mapping[int, Sequence[int]]  # token ids by choice


class Kind(StrEnum):
    """The kinds of violations."""

    LOST = "lost"  # a job, an event or a token that should be there
    DUPLICATED = "duplicated"  # a second job for one key; an event or a token said twice
    REORDERED = "reordered"  # an event that comes after a later one
    WRONG = "wrong"  # another token, another event under a known number, a false end
    DOUBLE_TERMINAL = "double_terminal"  # an end after the end
    UNTOLD = "callbacks_untold"  # a job has ended and its receiver has accepted no word of it
    EARLY = "early"  # a job that started before its start
    SECOND_ID = "callbacks_under_a_second_id"  # a receiver cannot tell that it knows this already


@dataclass(frozen=True, slots=True)
class Violation:
    kind: Kind
    story: str
    detail: str


class Cut(NamedTuple):
    """A power cut, or a failover. Redis kept what it had acknowledged before `begun_s`. `shard`: of
    a cluster."""

    begun_s: float
    ended_s: float
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a log as a client received it."""

    number: int
    hash: str
    output: Output


@dataclass(slots=True)
class Story:
    """One request of one client, across all its connections.

    `expected` holds all tokens of each choice. If `is_exact` is False, they are those of a real
    model: `is_diverged` is set at the first difference, and the model judges `output`.
    """

    ledger: "Ledger"
    name: str
    expected: Sequence[Sequence[int]]
    asked: Job | None = None  # what the model needs to judge a difference
    is_exact: bool = True
    may_be_cancelled: bool = False
    has_callback: bool = False
    start_at: float | None = None  # Unix seconds
    job_id: str | None = None
    status: str | None = None  # the terminal status that the client received
    events: dict[int, Event] = field(default_factory=dict)
    is_diverged: bool = False
    num_tokens_at_cancel: int | None = None
    opened_s: float = 0.0
    accepted_s: float = 0.0  # when the client received its job's id
    last_news_s: float = 0.0
    _next: int = 1
    _received: set[int] = field(default_factory=set)  # numbers on this connection

    @property
    def may_have_lost(self) -> bool:
        """Whether a power cut may have lost something that was acknowledged at this time."""
        return self._was_cut_by(self.last_news_s)

    @property
    def is_excused(self) -> bool:
        """Whether the job itself may have been lost: its caller learned of it when a power cut
        took what was written, or later."""
        return self._was_cut_by(self.accepted_s)

    def _was_cut_by(self, last_s: float) -> bool:
        return any(
            self.opened_s <= cut.ended_s
            and cut.begun_s <= last_s
            and self.ledger.is_struck(cut, self.job_id or "")
            for cut in self.ledger.cuts_s
        )

    def accepted(self, job_id: str) -> None:
        """The client has received the id of its job. One key has one job."""
        if self.job_id is not None and job_id != self.job_id:
            self.vanished(Kind.DUPLICATED, f"a second job {job_id}")
        if job_id != self.job_id:
            self.job_id = job_id
            self.ledger.stories_by_job[job_id] = self
            self.accepted_s = self.ledger.clock_s()
        self.touch()

    def vanished(self, kind: Kind = Kind.LOST, detail: str = "the accepted job is unknown") -> None:
        """The accepted job no longer exists; the client submits it again."""
        assert self.job_id is not None, "a job without an id cannot vanish"
        if self.is_excused:
            self.ledger.num_rolled_back += 1
        else:
            self.violate(kind, detail)
        self.job_id = None
        self.events.clear()

    def connect(self, after: int) -> None:
        """A connection that resumes after an event, or starts again."""
        if self.may_have_lost:
            self._forget_after(after)
        self._next = after + 1
        self._received.clear()

    def _forget_after(self, number: int) -> None:
        """Output that was lost and is computed again may be split into other events; its tokens are
        compared all the same."""
        self.events = {n: event for n, event in self.events.items() if n <= number}

    def receive(self, event: Event) -> None:
        """An event on the current connection."""
        may_have_lost = self.may_have_lost  # by the news before this event
        self.touch()
        number = event.number
        if self.status is not None:
            self.violate(Kind.DOUBLE_TERMINAL, f"event {number} after the end")
            return
        if number != self._next:
            self._misplaced(number)
        self._received.add(number)
        self._next = max(self._next, number + 1)
        known = self.events.get(number)
        if known is not None and known != event and may_have_lost:
            # This connection began before the power cut, and an earlier one had got further.
            self._forget_after(number - 1)
        elif known is not None:
            if known != event:
                self.violate(Kind.WRONG, f"event {number} was another before")
            return
        self.events[number] = event
        self._check_tokens(event)

    def _misplaced(self, number: int) -> None:
        if number in self._received:
            self.violate(Kind.DUPLICATED, f"event {number} twice")
        elif number < self._next:
            self.violate(Kind.REORDERED, f"event {number} after event {self._next - 1}")
        elif not self.ledger.has_hidden_events:
            self.violate(Kind.LOST, f"event {number} where {self._next} was due")

    def _check_tokens(self, event: Event) -> None:
        """Compares the tokens with the expected ones at this position, after those of all earlier
        events."""
        for choice, ids in event.output.items():
            start = sum(
                len(before.output.get(choice, ()))
                for number, before in self.events.items()
                if number < event.number
            )
            self._compare(choice, start, list(ids), f"event {event.number}")

    def _compare(self, choice: int, start: int, ids: list[int], where: str) -> None:
        if self.is_diverged or list(self.expected[choice][start : start + len(ids)]) == ids:
            return
        if not self.is_exact:
            self.is_diverged = True  # the model decides whether it was a near-tie
            return
        self.violate(Kind.WRONG, f"{where}: tokens of choice {choice} from position {start}")

    def reset(self) -> None:
        """The client was told to start again. Only a Redis that lost writes may cause this."""
        if not self.may_have_lost:
            self.violate(Kind.LOST, "a reset, where nothing acknowledged may be lost")
        self.ledger.num_resets += 1
        self.events.clear()
        self.is_diverged = False
        self.connect(0)

    def ended(self, status: str) -> None:
        """The client was told that the job has ended."""
        self.touch()
        if self.status is not None and not self.may_have_lost:
            self.violate(Kind.DOUBLE_TERMINAL, f"{status} after {self.status}")
        self.status = status
        if status == JobStatus.CANCELLED and self.may_be_cancelled:
            return
        if status != JobStatus.SUCCEEDED:
            self.violate(Kind.LOST, f"the job is {status}")

    def answered(self, output: Output) -> None:
        """A complete answer, as in results and unbroken streams."""
        for choice, expected in enumerate(self.expected):
            ids = list(output.get(choice, ()))
            self._compare(choice, 0, ids, "the answer")
            if len(ids) < len(expected) and not self.is_diverged:
                self.violate(Kind.LOST, f"{len(expected) - len(ids)} tokens of choice {choice}")

    @property
    def output(self) -> dict[int, list[int]]:
        """All received tokens, by choice."""
        joined: dict[int, list[int]] = {index: [] for index in range(len(self.expected))}
        for number in sorted(self.events):
            for choice, ids in self.events[number].output.items():
                joined[choice] += ids
        return joined

    def touch(self) -> None:
        """Something arrived: records how long the client was without news."""
        now_s = self.ledger.clock_s()
        self.ledger.longest_stall_s = max(
            self.ledger.longest_stall_s, now_s - (self.last_news_s or now_s)
        )
        self.last_news_s = now_s

    def violate(self, kind: Kind, detail: str) -> None:
        self.ledger.violations.append(Violation(kind, f"{self.name} {self.job_id}", detail))


@dataclass(slots=True)
class Ledger:
    """All stories of a campaign."""

    # Power cuts that lost what was acknowledged, each from its begin to its end.
    cuts_s: Sequence[Cut] = ()
    # Whether a cut may have lost what there is of a job; "": of one whose id no caller knows.
    is_struck: Callable[[Cut, str], bool] = lambda cut, job_id: True
    clock_s: Callable[[], float] = time.monotonic
    has_hidden_events: bool = False  # of flows, about their calls: no client sees them
    stories: list[Story] = field(default_factory=list)
    stories_by_job: dict[str, Story] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # what clients went through
    num_resets: int = 0
    num_rolled_back: int = 0
    num_near_ties: int = 0
    num_tokens: int = 0  # in the logs at the end
    num_callbacks: int = 0  # ended jobs with a callback
    num_deliveries: int = 0  # that receivers have accepted, repeats included
    longest_stall_s: float = 0.0

    def open(
        self,
        name: str,
        expected: Sequence[Sequence[int]],
        *,
        asked: Job | None = None,
        is_exact: bool = True,
        may_be_cancelled: bool = False,
    ) -> Story:
        story = Story(self, name, expected, asked, is_exact, may_be_cancelled)
        story.opened_s = self.clock_s()
        story.touch()
        self.stories.append(story)
        return story

    def lost_unheard(self, name: str) -> None:
        """A job that Redis had accepted is gone before its caller received its id."""
        if self.cuts_s:
            self.num_rolled_back += 1
        else:
            self.violations.append(Violation(Kind.LOST, name, "a job whose id no client received"))

    def by_kind(self) -> dict[str, int]:
        """The number of violations of each kind, also of kinds without any."""
        found = Counter(violation.kind for violation in self.violations)
        return {kind.value: found[kind] for kind in Kind}

    # --- at the end ---------------------------------------------------------------------------

    def check_jobs(self, has_key: Mapping[str, bool]) -> None:
        """Every accepted job exists. Jobs that no client knows were submitted without a key: a
        client with a key repeats its call until it receives the id."""
        for story in self.stories:
            if story.job_id is not None and story.job_id not in has_key:
                story.vanished()
        for job_id in has_key.keys() - self.stories_by_job.keys():
            if has_key[job_id]:
                detail = "a job that no client was told of"
                self.violations.append(Violation(Kind.DUPLICATED, job_id, detail))

    def check_start(self, job_id: str, claimed_ms: int | None) -> None:
        """When it was first claimed, by the clock of Redis."""
        story = self.stories_by_job[job_id]
        early_ms = (story.start_at or 0) * 1000 - (math.inf if claimed_ms is None else claimed_ms)
        if early_ms > 0:
            story.violate(Kind.EARLY, f"started {early_ms} ms before its start")

    def check_log(self, job_id: str, status: JobStatus, entries: Sequence[LogEntry]) -> None:
        """Compares the log in Redis with the expected output and with what clients received."""
        story = self.stories_by_job[job_id]
        if status not in TERMINAL_STATUSES:
            story.violate(Kind.LOST, f"it never ended: {status}")
        ends = [index for index, entry in enumerate(entries) if isinstance(entry.event, End)]
        if len(ends) > 1 or (ends and ends[0] != len(entries) - 1):
            story.violate(Kind.DOUBLE_TERMINAL, "the log goes on after its end")
        output: dict[int, list[int]] = {index: [] for index in range(len(story.expected))}
        for position, entry in enumerate(entries, 1):
            if entry.number != position:
                story.violate(Kind.LOST, f"the log holds event {entry.number} as {position}.")
            if isinstance(entry.event, Tokens):
                for delta in entry.event.deltas:
                    self._check_position(story, delta.start, len(output[delta.choice]))
                    output[delta.choice] += delta.token_ids
        self.num_tokens += sum(map(len, output.values()))
        self._check_truth(story, status, output)
        self._check_shown(story, entries)

    def _check_position(self, story: Story, start: int, num_before: int) -> None:
        if start > num_before:
            story.violate(Kind.LOST, f"tokens {num_before} to {start} are not in the log")
        elif start < num_before:
            story.violate(Kind.DUPLICATED, f"tokens {start} to {num_before} twice in the log")

    def _check_truth(self, story: Story, status: JobStatus, output: Output) -> None:
        if status is JobStatus.SUCCEEDED:
            story.answered(output)
        else:
            for choice, ids in output.items():
                story._compare(choice, 0, list(ids), "the log")
        if status != JobStatus.SUCCEEDED and not (
            status is JobStatus.CANCELLED and story.may_be_cancelled
        ):
            story.violate(Kind.LOST, f"the job is {status}")
        if story.status not in (None, status) and not story.may_have_lost:
            story.violate(Kind.DOUBLE_TERMINAL, f"{story.status} to its client, {status} in Redis")
        num_tokens = sum(map(len, output.values()))
        if self.has_hidden_events:
            return  # the flow's usage is checked in tests/chaos/flows.py
        if story.num_tokens_at_cancel not in (None, num_tokens) and not story.may_have_lost:
            story.violate(Kind.WRONG, "it ran on after its cancel")

    def _check_shown(self, story: Story, entries: Sequence[LogEntry]) -> None:
        """Every event that a client has is in the log, unless a power cut removed it."""
        if story.may_have_lost:
            return
        hashes = {entry.number: entry.hash for entry in entries}
        for event in story.events.values():
            if event.number not in hashes:
                story.violate(Kind.LOST, f"event {event.number}: shown, but not in the log")
            elif event.hash and event.hash != hashes[event.number]:
                story.violate(Kind.WRONG, f"event {event.number}: shown otherwise than logged")
