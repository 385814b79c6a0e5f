"""Divides the memory of Redis between lanes and their tenants: contract/lua/_memory.lua in Python.

Has no state: tests/oracle/reference.py holds it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from contract.codec import encode
from contract.events import LogEntry
from contract.function_types import Submission
from contract.functions import encoded_parts
from contract.jobs import Job, logprob_bytes

RECORD_BYTES = 9_000
CALLBACK_BYTES = 3_000
TOKEN_BYTES = 100
EVENT_BYTES = 40
MAX_GUESS = 512
PASSING_MS = 15_000
MAX_FORGOTTEN = 4
OWN_PARTS = 32
MAX_OWN = 8
TIMES_FREE = 4


class Need(NamedTuple):
    """Bytes of a job: without its log, and with the log that is expected."""

    fixed: int
    whole: int
    token: int  # of the log, for each token


def need_of(job: Job, submission: Submission, num_output: int, *, is_cap: bool) -> Need:
    """`is_cap`: nothing is known of the output's length but its cap."""
    encoded, metadata, callback = encoded_parts(job, submission)
    num_sent = len(encoded) + len(metadata) + 2 * len(callback)
    fixed = RECORD_BYTES + allocated(num_sent + 8 * len(job.tenant + job.model + job.lane))
    if submission.callback is not None:
        fixed += CALLBACK_BYTES
    guess = min(num_output, MAX_GUESS) if is_cap else num_output
    token = TOKEN_BYTES + allocated(logprob_bytes(job.params.logprobs))
    scored = job.num_prompt_tokens * logprob_bytes(job.params.prompt_logprobs)
    whole = fixed + token * guess + allocated(submission.vector_bytes + scored)
    return Need(fixed, whole, token)


def log_bytes(log: list[LogEntry]) -> int:
    return sum(
        allocated(len(f"{entry.number} {entry.hash} ") + len(encode(entry.event)) + EVENT_BYTES)
        for entry in log
    )


def refusal(
    room: float, lanes: Mapping[str, int], lane: str, own_bytes: int, num_bytes: int
) -> tuple[str, bool] | None:
    """The limit that a job of so many bytes exceeds, and whether it would exceed it alone.
    `own_bytes`: of its tenant in the lane."""
    if room == math.inf:
        return None
    after = {**lanes, lane: lanes.get(lane, 0) + num_bytes}
    own = room / OWN_PARTS * min(1, MAX_OWN / len(after))
    if after[lane] <= own:
        return None
    common = room * (1 - MAX_OWN / OWN_PARTS)
    is_alone = num_bytes > TIMES_FREE * (common + own - num_bytes)
    free = common - sum(max(0.0, held - own) for held in after.values())
    if free < 0:
        return "lane_memory", is_alone
    return ("tenant_memory", is_alone) if own_bytes + num_bytes > TIMES_FREE * free else None


def allocated(num_bytes: int) -> int:
    return math.ceil(num_bytes * 1.25)
