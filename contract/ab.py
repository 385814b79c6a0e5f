"""Two batching configurations beside each other: what Redis stores about their jobs, without text.

The functions write it (contract/lua/_ab.lua); this module reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import redis.asyncio

from contract.catalogue import WORKER_TTL_S
from contract.connection import broker_errors, now_ms
from contract.jobs import JobStatus
from contract.keys import Keys

ARMS = CONTROL, CANDIDATE = "control", "candidate"


class AbJob(msgspec.Struct, frozen=True, array_like=True):
    """An ended job, in the order of ab.ended. Times are Unix milliseconds of the Redis clock; 0
    where the job did not get so far."""

    arm: str  # to which it was assigned
    version: str  # of that arm's configuration
    served_by: str  # version of the worker that claimed it last; '': none
    lane: str
    status: JobStatus
    num_prompt_tokens: int
    num_output_tokens: int  # of all choices
    num_choices: int
    num_attempts: int
    created_ms: int
    claimed_ms: int
    first_token_ms: int
    finished_ms: int

    @property
    def ttft_s(self) -> float | None:
        """From its submission to its first output."""
        return (self.first_token_ms - self.created_ms) / 1000 if self.first_token_ms else None

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens of a choice; None below two tokens."""
        gaps = self.num_output_tokens / self.num_choices - 1
        if not self.first_token_ms or gaps < 1:
            return None
        return (self.finished_ms - self.first_token_ms) / 1000 / gaps

    @property
    def e2e_s(self) -> float:
        """From its submission to its end."""
        return (self.finished_ms - self.created_ms) / 1000


@dataclass(frozen=True, slots=True)
class AbRecord:
    """A model's A/B; the mappings are by arm. `share`: the candidate's share of the jobs. `jobs`:
    the latest ended jobs, oldest first. `num_open`: jobs that wait or run. `num_workers`: live
    ones."""

    versions: Mapping[str, str]
    share: float
    jobs: tuple[AbJob, ...]
    num_open: Mapping[str, int]
    num_workers: Mapping[str, int]


async def read_ab(client: redis.asyncio.Redis, keys: Keys, model: str) -> AbRecord | None:
    """None if the model has had no candidate. Raises BrokerUnavailable, CommandDenied,
    WireError."""
    with broker_errors(client, "HMGET, HGETALL or XRANGE", record="record of an A/B"):
        fields: Any = await client.hmget(keys.of("ab", model), [*ARMS, "share"])
        if None in fields:
            return None
        versions = {arm: fields[i].decode() for i, arm in enumerate(ARMS)}
        totals: Any = await client.hgetall(keys.of("totals", model))
        rows: Any = await client.xrange(keys.of("ab_jobs", model))
        return AbRecord(
            versions,
            float(fields[2]),
            tuple(msgspec.msgpack.decode(row[b"j"], type=AbJob) for _, row in rows),
            {arm: _num_open(totals, version) for arm, version in versions.items()},
            await _num_workers(client, keys, model),
        )


def merged(parts: Sequence[AbRecord]) -> AbRecord:
    """The A/B over all partitions."""
    first, *others = parts
    if not others:
        return first
    same = [part for part in parts if part.versions == first.versions]
    jobs = sorted((job for part in same for job in part.jobs), key=lambda job: job.created_ms)
    num_open = {arm: sum(part.num_open[arm] for part in same) for arm in ARMS}
    num_workers = {arm: sum(part.num_workers[arm] for part in parts) for arm in ARMS}
    return replace(first, jobs=tuple(jobs), num_open=num_open, num_workers=num_workers)


def _num_open(totals: Mapping[bytes, bytes], version: str) -> int:
    ended = f"config_requests_total:{version}:".encode()
    return int(totals.get(f"config_submitted_total:{version}".encode(), 0)) - sum(
        int(num) for field, num in totals.items() if field.startswith(ended)
    )


async def _num_workers(client: redis.asyncio.Redis, keys: Keys, model: str) -> dict[str, int]:
    """The number of workers by arm, from their heartbeats."""
    since_ms = await now_ms(client) - int(WORKER_TTL_S * 1000)
    names: Any = await client.zrange(keys.of("workers", model), since_ms, "+inf", byscore=True)
    found = dict.fromkeys(ARMS, 0)
    for name in names:
        info: Any = await client.hget(keys.of("worker", name.decode()), "info")
        is_candidate = "candidate_share" in msgspec.json.decode(info or b"{}")
        found[CANDIDATE if is_candidate else CONTROL] += 1
    return found
