"""Compares the delivered callbacks with the ends of jobs in Redis."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract.jobs import TERMINAL_STATUSES, JobStatus
from tests.chaos.ledger import Kind, Ledger, Story, Violation


@dataclass(frozen=True, slots=True)
class Delivery:
    """One verified message that arrived; `message_id` is its `webhook-id`."""

    job_id: str
    message_id: str
    status: str
    was_accepted: bool


def check_deliveries(
    ledger: Ledger,
    statuses: Mapping[str, JobStatus],
    deliveries: Sequence[Delivery],
    *,
    num_forged: int = 0,
) -> None:
    """Every end of a job with a callback was accepted at least once, under one id and with the
    right content. `statuses` are those of all jobs in Redis."""
    told: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        told[delivery.job_id].append(delivery)
    if num_forged:
        detail = f"{num_forged} messages could not be verified"
        ledger.violations.append(Violation(Kind.WRONG, "callbacks", detail))
    for story in ledger.stories:
        status = statuses.get(story.job_id or "")
        if story.has_callback and status in TERMINAL_STATUSES:
            ledger.num_callbacks += 1
            _check_story(story, status, told[story.job_id or ""])


def _check_story(story: Story, status: JobStatus, told: Sequence[Delivery]) -> None:
    num_accepted = sum(delivery.was_accepted for delivery in told)
    story.ledger.num_deliveries += num_accepted
    if not num_accepted:
        story.violate(Kind.UNTOLD, f"{status}; attempts that arrived: {len(told)}")
    if (num_ids := len({delivery.message_id for delivery in told})) > 1:
        story.violate(Kind.SECOND_ID, f"{num_ids} ids for one end")
    said = {delivery.status for delivery in told}
    if said - {status} and not story.may_have_lost:
        story.violate(Kind.WRONG, f"its receiver was told {sorted(said)}, it is {status}")
