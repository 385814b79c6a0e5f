"""Tests of the ledger: every kind of violation is fabricated, found and named."""

from collections.abc import Callable

import pytest

from contract.events import ChoiceDelta, End, LogEntry, Tokens
from contract.jobs import JobStatus
from tests.chaos.deliveries import Delivery, check_deliveries
from tests.chaos.ledger import Cut, Event, Kind, Ledger, Story

EXPECTED = ((1, 2, 3, 4),)


def make_story(ledger: Ledger, *, is_exact: bool = True) -> Story:
    """An accepted request whose answer is 1 2 3 4."""
    story = ledger.open("a story", EXPECTED, is_exact=is_exact)
    story.accepted("job")
    story.connect(0)
    return story


def event(number: int, *token_ids: int, hash_: str = "") -> Event:
    return Event(number, hash_ or f"h{number}", {0: token_ids})


def log_of(
    *events: tuple[int, tuple[int, ...]], status: JobStatus = JobStatus.SUCCEEDED
) -> list[LogEntry]:
    """A log of (position of the first token, token ids), and its end."""
    entries = [
        LogEntry(number, f"h{number}", Tokens((ChoiceDelta(0, start, ids, ""),)))
        for number, (start, ids) in enumerate(events, 1)
    ]
    end = End(status, "", "", 1, 4)
    return [*entries, LogEntry(len(entries) + 1, "end", end)]


def lose_an_event(story: Story) -> None:
    story.receive(event(1, 1, 2))
    story.receive(event(3, 3, 4))


def repeat_an_event(story: Story) -> None:
    story.receive(event(1, 1, 2))
    story.receive(event(1, 1, 2))


def swap_events(story: Story) -> None:
    story.connect(1)
    story.receive(event(2, 3, 4))
    story.receive(event(1, 1, 2))


def say_another_token(story: Story) -> None:
    story.receive(event(1, 1, 9))


def repeat_tokens_under_a_new_number(story: Story) -> None:
    story.receive(event(1, 1, 2))
    story.receive(event(2, 1, 2))


def splice_silently(story: Story) -> None:
    story.receive(event(1, 1, 2))
    story.connect(0)
    story.receive(event(1, 1, 2, hash_="another"))


def end_twice(story: Story) -> None:
    story.ended("succeeded")
    story.ended("succeeded")


def go_on_after_the_end(story: Story) -> None:
    story.ended("succeeded")
    story.receive(event(1, 1, 2))


def end_too_early(story: Story) -> None:
    story.receive(event(1, 1, 2))
    story.ended("succeeded")
    story.answered(story.output)


def fail(story: Story) -> None:
    story.ended("failed")


def cancel_of_itself(story: Story) -> None:
    story.ended("cancelled")


def make_two_jobs(story: Story) -> None:
    story.accepted("another job")


def reset_for_nothing(story: Story) -> None:
    story.reset()


def forget_the_job(story: Story) -> None:
    story.ledger.check_jobs({})


def invent_a_job(story: Story) -> None:
    story.ledger.check_jobs({"job": True, "a stranger": True})


def start_early(story: Story) -> None:
    story.start_at = 1_700_000_000.5
    story.ledger.check_start("job", 1_700_000_000_499)


def never_end(story: Story) -> None:
    log = log_of((0, (1, 2)))[:-1]
    story.ledger.check_log("job", JobStatus.STREAMING, log)


def repeat_tokens_in_the_log(story: Story) -> None:
    log = log_of((0, (1, 2)), (0, (1, 2)), (2, (3, 4)))
    story.ledger.check_log("job", JobStatus.SUCCEEDED, log)


def leave_tokens_out_of_the_log(story: Story) -> None:
    log = log_of((0, (1, 2)), (3, (4,)))
    story.ledger.check_log("job", JobStatus.SUCCEEDED, log)


def end_the_log_twice(story: Story) -> None:
    log = log_of((0, (1, 2, 3, 4)))
    story.ledger.check_log("job", JobStatus.SUCCEEDED, [*log, log[-1]])


def log_something_else_than_was_shown(story: Story) -> None:
    story.receive(event(1, 1, 2, hash_="another"))
    story.ledger.check_log("job", JobStatus.SUCCEEDED, log_of((0, (1, 2)), (2, (3, 4))))


def run_on_after_a_cancel(story: Story) -> None:
    story.may_be_cancelled = True
    story.ended("cancelled")
    story.num_tokens_at_cancel = 1
    log = log_of((0, (1, 2)), status=JobStatus.CANCELLED)
    story.ledger.check_log("job", JobStatus.CANCELLED, log)


def deliver(story: Story, *deliveries: Delivery, num_forged: int = 0) -> None:
    """The story's job has succeeded; returns what its receiver got."""
    story.has_callback = True
    statuses = {"job": JobStatus.SUCCEEDED}
    check_deliveries(story.ledger, statuses, deliveries, num_forged=num_forged)


def tell_nobody(story: Story) -> None:
    deliver(story)


def tell_another_job_s_receiver(story: Story) -> None:
    deliver(story, Delivery("another job", "another job-1", "succeeded", True))


def give_up_telling(story: Story) -> None:
    deliver(story, Delivery("job", "job-1", "succeeded", False))


def tell_under_a_second_id(story: Story) -> None:
    accepted = Delivery("job", "job-1", "succeeded", True)
    deliver(story, accepted, Delivery("job", "job-2", "succeeded", False))


def tell_a_false_end(story: Story) -> None:
    deliver(story, Delivery("job", "job-1", "failed", True))


def tell_what_cannot_be_verified(story: Story) -> None:
    deliver(story, Delivery("job", "job-1", "succeeded", True), num_forged=1)


FABRICATED: list[tuple[Callable[[Story], None], Kind]] = [
    (lose_an_event, Kind.LOST),
    (repeat_an_event, Kind.DUPLICATED),
    (swap_events, Kind.REORDERED),
    (say_another_token, Kind.WRONG),
    (repeat_tokens_under_a_new_number, Kind.WRONG),
    (splice_silently, Kind.WRONG),
    (end_twice, Kind.DOUBLE_TERMINAL),
    (go_on_after_the_end, Kind.DOUBLE_TERMINAL),
    (end_too_early, Kind.LOST),
    (fail, Kind.LOST),
    (cancel_of_itself, Kind.LOST),
    (make_two_jobs, Kind.DUPLICATED),
    (reset_for_nothing, Kind.LOST),
    (forget_the_job, Kind.LOST),
    (invent_a_job, Kind.DUPLICATED),
    (start_early, Kind.EARLY),
    (never_end, Kind.LOST),
    (repeat_tokens_in_the_log, Kind.DUPLICATED),
    (leave_tokens_out_of_the_log, Kind.LOST),
    (end_the_log_twice, Kind.DOUBLE_TERMINAL),
    (log_something_else_than_was_shown, Kind.WRONG),
    (run_on_after_a_cancel, Kind.WRONG),
    (tell_nobody, Kind.UNTOLD),
    (tell_another_job_s_receiver, Kind.UNTOLD),
    (give_up_telling, Kind.UNTOLD),
    (tell_under_a_second_id, Kind.SECOND_ID),
    (tell_a_false_end, Kind.WRONG),
    (tell_what_cannot_be_verified, Kind.WRONG),
]


@pytest.mark.parametrize(
    ("happens", "kind"), FABRICATED, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_broken_promise_is_found(happens: Callable[[Story], None], kind: Kind) -> None:
    """Each fabricated observation gives at least one violation of its kind."""
    ledger = Ledger()
    happens(make_story(ledger))
    assert ledger.by_kind()[kind] >= 1


def test_a_correct_story_has_no_violation() -> None:
    """Disconnected, resumed, repeated from the start, ended, replayed, and delivered twice under
    one id."""
    ledger = Ledger()
    story = make_story(ledger)
    story.receive(event(1, 1, 2))
    story.connect(1)
    story.receive(event(2, 3))
    story.connect(0)
    for number, ids in enumerate(((1, 2), (3,), (4,)), 1):
        story.receive(event(number, *ids))
    story.ended("succeeded")
    story.answered(story.output)
    story.start_at = 1_700_000_000.5
    ledger.check_start("job", 1_700_000_000_500)
    ledger.check_jobs({"job": True, "of a caller that left before it heard": False})
    ledger.check_log("job", JobStatus.SUCCEEDED, log_of((0, (1, 2)), (2, (3,)), (3, (4,))))
    refused = Delivery("job", "job-1", "succeeded", False)
    accepted = Delivery("job", "job-1", "succeeded", True)
    deliver(story, refused, accepted, accepted)
    assert ledger.violations == []
    assert ledger.num_tokens == 4
    assert (ledger.num_callbacks, ledger.num_deliveries) == (1, 2)


def test_only_losses_by_a_power_cut_are_excused() -> None:
    """A job accepted just before the cut, or whose id no client has, may vanish. A job known for
    long may not, and none may without a power cut."""
    now_s = 100.0
    ledger = Ledger(cuts_s=[Cut(107.0, 110.2)], clock_s=lambda: now_s)
    old = make_story(ledger)
    now_s = 109.5
    young = make_story(ledger)
    now_s = 112.0
    young.vanished()
    assert (ledger.num_rolled_back, ledger.violations) == (1, [])
    ledger.lost_unheard("caller")
    assert (ledger.num_rolled_back, ledger.violations) == (2, [])
    old.vanished()
    assert ledger.by_kind()[Kind.LOST] == 1
    never_cut = Ledger()
    never_cut.lost_unheard("caller")
    assert never_cut.by_kind()[Kind.LOST] == 1


def test_output_that_a_power_cut_took_may_be_split_otherwise() -> None:
    """A connection from before the cut delivers, after it, the same tokens in other events than an
    earlier connection did. Other tokens are a violation all the same."""
    now_s = 109.0
    ledger = Ledger(cuts_s=[], clock_s=lambda: now_s)
    stories = make_story(ledger), make_story(ledger)
    for story in stories:
        for number in (1, 2, 3):
            story.receive(event(number, number))
        story.connect(0)
        story.receive(event(1, 1))
    ledger.cuts_s = [Cut(107.0, 110.2)]
    now_s = 111.0
    split, wrong = stories
    split.receive(event(2, 2, 3, 4))
    assert ledger.violations == []
    wrong.receive(event(2, 2, 9))
    assert ledger.by_kind()[Kind.WRONG] == 1


def test_differences_of_a_real_model_are_judged_by_the_model() -> None:
    """Another token is not yet a violation: the story is marked for scoring by the model."""
    ledger = Ledger()
    story = make_story(ledger, is_exact=False)
    story.receive(event(1, 1, 9))
    assert story.is_diverged
    assert ledger.violations == []


def test_the_longest_stall_is_kept() -> None:
    """The longest time between two messages, over all stories."""
    now_s = 0.0
    ledger = Ledger(clock_s=lambda: now_s)
    story = make_story(ledger)
    for now_s in (1.0, 4.5, 5.0):  # noqa: B007 - the clock
        story.touch()
    assert ledger.longest_stall_s == 3.5
